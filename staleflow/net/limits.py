"""Limits of the transport: upper bounds on the cost of anything a peer sends and of any waiting peer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Sizes and times of one endpoint or client. Both sides of a connection must agree on the sizes."""

    max_message_bytes: int = 256 << 20
    """Maximum size of a message, all frames together."""
    max_header_bytes: int = 16 << 20
    """Maximum size of the header of a request, which may need many times its size once decoded. Manifests of models
    with tens of thousands of tensors have some megabytes."""
    max_frames: int = 16_384
    """Maximum number of raw frames of a message, in addition to its header."""
    max_pending: int = 4_096
    """Maximum number of calls that wait for their reply: per peer at an endpoint, in total at a client."""
    max_held_bytes: int = 2 << 30
    """Maximum size of the frames of all pending calls of an endpoint; further calls are refused ``busy``."""
    max_peers: int = 8_192
    """Maximum number of live peers of an endpoint."""
    send_queue: int = 8_192
    """Messages that ZeroMQ queues for a peer. More than ``max_pending``, so a peer that reads loses no reply."""
    max_unread_bytes: int = 1 << 30
    """Maximum size of the large reply frames that one peer has not read yet; further replies are dropped and the peer
    retries."""
    max_all_unread_bytes: int = 4 << 30
    """The same for all peers together; beyond it, a peer with unread frames gets no further reply."""
    receive_queue: int = 256
    """Messages of a peer that ZeroMQ reads ahead; then the peer has to wait."""
    burst_messages: int = 128
    """Messages handled before the loop's timers run."""
    copy_below_bytes: int = 32_768
    """Frames smaller than this are copied when sent: cheaper than tracking the owner of the bytes."""
    heartbeat_s: float = 1.0
    """Maximum interval between two messages of a client."""
    missed: int = 3
    """Number of missed heartbeats after which the other side counts as gone."""
    retry_s: float = 1.0
    """Minimum delay before an unanswered request is sent again."""
    retry_cap_s: float = 2.0
    """Maximum delay before an unanswered request is sent again. A restarted server has lost the pending calls of its
    predecessor."""
    linger_ms: int = 500
    """Time in which a closed socket may still deliver sent messages."""
    idle_s: float = 10.0
    """A TCP connection without a whole message for this long is shut down; its handshake has the same limit."""
    max_connections: int = 8_192
    """Maximum number of TCP connections of an endpoint; beyond it, the oldest silent connections are shut down."""
    max_unfinished_bytes: int = 512 << 20
    """Maximum size of unfinished messages of all TCP connections of an endpoint together."""
    max_growth_bytes: int = 256 << 20
    """Maximum growth of the process's memory during one unfinished message, beyond twice the bytes of all unfinished
    ones."""

    @property
    def silence_s(self) -> float:
        """Silence after which the other side counts as gone."""
        return self.heartbeat_s * self.missed
