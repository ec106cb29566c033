"""Who gets in: the answers to ZeroMQ's question about each CURVE handshake (ZAP, RFC 27).

One place of judgement a context, so each endpoint with keys has a context of its own. It is open before the endpoint
is bound, and the endpoint demands it (``ZAP_ENFORCE_DOMAIN``): no answer lets nobody in.
"""

import logging
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from staleflow.net.allow_list import AllowList
from staleflow.net.keyring import DOMAIN
from staleflow.net.limits import TransportLimits
from staleflow.net.zmq_stream import DrainedSocket

log = logging.getLogger(__name__)

ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_BINARY_KEY_BYTES: Final = 32


class Doorman:
    """Answers with the public key (Z85) as the user id of every message of the connection."""

    def __init__(
        self,
        within: "zmq.Context[zmq.Socket[bytes]]",
        allowed: AllowList,
        limits: TransportLimits,
        on_stranger: Callable[[str, str], None],
    ) -> None:
        """``on_stranger`` gets the address and the key (empty: none) of who was turned away."""
        self._allowed = allowed
        self._on_stranger = on_stranger
        self._socket = DrainedSocket(zmq.REP, num_heads=1, limits=limits, on_message=self._judge, within=within)
        self._socket.zmq.bind(ADDRESS)

    def start(self) -> None:
        self._socket.start()

    def close(self) -> None:
        self._socket.close(linger_ms=0)

    def _judge(self, head: list[bytes], frames: list[memoryview], oversize: bool) -> None:
        """Version; then request id, domain, address, identity, mechanism, credentials."""
        parts = [bytes(frame) for frame in frames[:6]]
        request = parts[0] if parts else b""
        if oversize or len(parts) < 6 or head[0] != _VERSION or parts[1] != DOMAIN or parts[4] != b"CURVE":
            self._turn_away(request, "", "")
            return
        address, credentials = parts[2].decode("utf-8", "backslashreplace"), parts[5]
        public = z85.encode(credentials) if len(credentials) == _BINARY_KEY_BYTES else b""
        self._allowed.refresh()
        if self._allowed.find(public) is None:
            self._turn_away(request, address, public.decode())
        else:
            self._socket.send((_VERSION, request, b"200", b"OK", public, b""))

    def _turn_away(self, request: bytes, address: str, public: str) -> None:
        self._socket.send((_VERSION, request, b"400", b"not allowed", b"", b""))
        self._on_stranger(address, public)
