"""Bounds of the transport: nothing that a peer sends, and no waiting peer, may cost more than this."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Sizes and times of one endpoint or client. Both sides of a connection must agree on the sizes."""

    max_message_bytes: int = 256 << 20
    """All frames of a message together."""
    max_header_bytes: int = 16 << 20
    """The header of a request, which may take many times its size once it is read. Manifests of models with tens of
    thousands of tensors have some megabytes."""
    max_frames: int = 16_384
    """Raw frames of a message, beside its header."""
    max_pending: int = 4_096
    """Calls that wait for their answer: of one peer at an endpoint, of one client."""
    max_held_bytes: int = 2 << 30
    """Frames of all calls of an endpoint that wait for their answers; what comes then is told to come back."""
    max_peers: int = 8_192
    """Peers of an endpoint that are alive at once."""
    send_queue: int = 8_192
    """Messages that ZeroMQ queues for a peer; more than ``max_pending``, so no answer to a peer that reads is lost."""
    max_unread_bytes: int = 1 << 30
    """Large frames of answers that one peer has not taken yet; further answers are dropped, and it asks again."""
    max_all_unread_bytes: int = 4 << 30
    """The same of all peers together; beyond it, who has taken nothing of the last answer gets no other."""
    receive_queue: int = 256
    """Messages of a peer that ZeroMQ reads ahead; then the peer has to wait."""
    burst_messages: int = 128
    """Messages handled before the loop's timers get a turn."""
    copy_below_bytes: int = 32_768
    """Frames smaller than this are copied when sent: cheaper than keeping track of the owner of the bytes."""
    heartbeat_s: float = 1.0
    """A client says something at least this often."""
    missed: int = 3
    """Heartbeats without a sign of life after which the other side is gone."""
    retry_s: float = 1.0
    """An unanswered request is sent again after this long at least, ..."""
    retry_cap_s: float = 2.0
    """... and at most. A restarted server knows nothing of the calls that the old one held."""
    linger_ms: int = 500
    """How long a closed socket may still deliver what was sent."""
    idle_s: float = 10.0
    """A TCP connection by which no whole message came for this long is shut down; its handshake has as long."""
    max_connections: int = 8_192
    """TCP connections of an endpoint; more, and the oldest of those that have said nothing are shut down."""
    max_unfinished_bytes: int = 512 << 20
    """Bytes that all TCP connections of an endpoint may have sent of messages that are not whole yet."""
    max_growth_bytes: int = 256 << 20
    """Growth of the process's memory during one unfinished message, beyond twice the bytes of all of them."""

    @property
    def silence_s(self) -> float:
        """Silence that means gone."""
        return self.heartbeat_s * self.missed
