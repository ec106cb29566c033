"""The bound side of TCP: bounds its connections and, with keys, attaches the sender's role to each message."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, cast
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from staleflow.net import addresses
from staleflow.net.allow_list import AllowList
from staleflow.net.connection_limits import CURVE_BYTES, POLL_INTERVAL_S, Connections, wire_bytes
from staleflow.net.keyring import DOMAIN, Keyring, as_server
from staleflow.net.limits import TransportLimits
from staleflow.net.zmq_stream import DrainedSocket, own_context
from staleflow.protocols.wire.codec import Data

BACKLOG: Final = 1_024
"""Connections that wait to be accepted."""
POLLS_PER_REFRESH: Final = 10
"""Polls of the connections between two polls of the allow-list."""
_UNKNOWN: Final = (b"", b"")
_SRCFD: Final = int(zmq.SRCFD)
_USER_ID: Final = "User-Id"
_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_BINARY_KEY_BYTES: Final = 32


class ZapHandler:
    """Decide which CURVE handshakes are admitted (ZAP, ZeroMQ RFC 27).

    The public key (Z85) becomes the user id of every message of the connection. A context has one handler, so each
    endpoint with keys has its own context. The handler is bound before the endpoint, and the endpoint requires it
    (``ZAP_ENFORCE_DOMAIN``): without an answer no client is admitted.
    """

    def __init__(
        self,
        within: "zmq.Context[zmq.Socket[bytes]]",
        allowed: AllowList,
        limits: TransportLimits,
        on_rejected: Callable[[str, str], None],
    ) -> None:
        """``on_rejected`` receives the address and the key (may be empty) of each rejected client."""
        self._allowed = allowed
        self._on_rejected = on_rejected
        self._socket = DrainedSocket(zmq.REP, num_heads=1, limits=limits, on_message=self._check, within=within)
        self._socket.zmq.bind(_ZAP_ADDRESS)

    def start(self) -> None:
        self._socket.start()

    def close(self) -> None:
        self._socket.close(linger_ms=0)

    def _check(self, head: list[bytes], frames: list[memoryview], oversize: bool) -> None:
        """Handle one request: version; then request id, domain, address, identity, mechanism, credentials."""
        parts = [bytes(frame) for frame in frames[:6]]
        request = parts[0] if parts else b""
        if oversize or len(parts) < 6 or head[0] != _ZAP_VERSION or parts[1] != DOMAIN or parts[4] != b"CURVE":
            self._reject(request, "", "")
            return
        address, credentials = parts[2].decode("utf-8", "backslashreplace"), parts[5]
        public = z85.encode(credentials) if len(credentials) == _BINARY_KEY_BYTES else b""
        self._allowed.refresh()
        if self._allowed.find(public) is None:
            self._reject(request, address, public.decode())
        else:
            self._socket.send((_ZAP_VERSION, request, b"200", b"OK", public, b""))

    def _reject(self, request: bytes, address: str, public: str) -> None:
        self._socket.send((_ZAP_VERSION, request, b"400", b"not allowed", b"", b""))
        self._on_rejected(address, public)


def set_router(target: "zmq.Socket[bytes]") -> None:
    """Set the options that every bound socket needs."""
    target.set(zmq.ROUTER_MANDATORY, 1)  # or messages to disconnected peers are dropped without an error
    target.set(zmq.ROUTER_HANDOVER, 1)  # a reconnecting client takes over its route from its dead connection
    target.set(zmq.BACKLOG, BACKLOG)


class Listener:
    """A bound ROUTER over TCP. With keys, the head of a message also has the role and the name of its sender's key;
    both are empty once the key is no longer allowed."""

    def __init__(
        self,
        bind: str,
        *,
        limits: TransportLimits,
        on_message: Callable[[list[bytes], list[memoryview], bool], None],
        on_drained: Callable[[], None] | None,
        keys: Keyring | None,
        insecure: bool,
        on_rejected: Callable[[str, str], None],
    ) -> None:
        self._allowed: AllowList | None = None
        self._zap: ZapHandler | None = None
        within = None
        if keys is not None:
            self._allowed, within = keys.allowed, own_context()
            self._zap = ZapHandler(within, keys.allowed, limits, on_rejected)
        self._socket = DrainedSocket(
            zmq.ROUTER,
            num_heads=2,
            limits=limits,
            on_message=on_message,
            on_drained=on_drained,
            sender=self._sender,
            within=within,
        )
        self.connections = Connections(limits, may_stay=self._is_allowed)
        self._timer: asyncio.TimerHandle | None = None
        self._polls = 0
        target = self._socket.zmq
        set_router(target)
        target.set(zmq.HANDSHAKE_IVL, int(limits.idle_s * 1_000))
        try:
            if keys is not None:
                as_server(target, keys.key)
            self.address = addresses.bind(target, bind, wide=keys is not None or insecure)
        except BaseException:
            self.close(linger_ms=0)
            raise
        self.connections.port = urlsplit(self.address).port or 0

    def start(self) -> None:
        if self._zap is not None:
            self._zap.start()
        self._socket.start()
        self._poll()

    def send(self, parts: Sequence[Data]) -> bool:
        return self._socket.send(parts)

    def close(self, linger_ms: int | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.connections.close()
        self._socket.close(linger_ms)
        if self._zap is not None:
            self._zap.close()

    def _poll(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(POLL_INTERVAL_S, self._poll)
        self._polls += 1
        if self._allowed is not None and self._polls % POLLS_PER_REFRESH == 0:
            self._allowed.refresh()
        self.connections.poll()

    def _is_allowed(self, key: bytes) -> bool:
        return self._allowed is None or self._allowed.find(key) is not None

    def _sender(self, part: zmq.Frame, sizes: list[int]) -> Sequence[bytes]:
        """Record the bytes received by the connection; return role and name of its key if there are keys."""
        descriptor = part.get(_SRCFD)
        if self._allowed is None:
            self.connections.arrived(descriptor, b"", wire_bytes(sizes))
            return ()
        try:
            key = cast("str", part.get(_USER_ID)).encode()
        except zmq.ZMQError:  # without the property, the handshake was never checked
            key = b""
        self.connections.arrived(descriptor, key, wire_bytes(sizes, CURVE_BYTES))
        holder = self._allowed.find(key)
        return _UNKNOWN if holder is None else (holder.role.encode(), holder.name.encode())
