"""The ZAP handler (ZeroMQ RFC 27): decides which CURVE handshakes are admitted.

A context has one handler, so each endpoint with keys has its own context. The handler is bound before the endpoint, and
the endpoint requires it (``ZAP_ENFORCE_DOMAIN``): without an answer no client is admitted.
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


class ZapHandler:
    """Answer handshakes. The public key (Z85) becomes the user id of every message of the connection."""

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
        self._socket.zmq.bind(ADDRESS)

    def start(self) -> None:
        self._socket.start()

    def close(self) -> None:
        self._socket.close(linger_ms=0)

    def _check(self, head: list[bytes], frames: list[memoryview], oversize: bool) -> None:
        """Handle one request: version; then request id, domain, address, identity, mechanism, credentials."""
        parts = [bytes(frame) for frame in frames[:6]]
        request = parts[0] if parts else b""
        if oversize or len(parts) < 6 or head[0] != _VERSION or parts[1] != DOMAIN or parts[4] != b"CURVE":
            self._reject(request, "", "")
            return
        address, credentials = parts[2].decode("utf-8", "backslashreplace"), parts[5]
        public = z85.encode(credentials) if len(credentials) == _BINARY_KEY_BYTES else b""
        self._allowed.refresh()
        if self._allowed.find(public) is None:
            self._reject(request, address, public.decode())
        else:
            self._socket.send((_VERSION, request, b"200", b"OK", public, b""))

    def _reject(self, request: bytes, address: str, public: str) -> None:
        self._socket.send((_VERSION, request, b"400", b"not allowed", b"", b""))
        self._on_rejected(address, public)
