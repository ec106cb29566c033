"""The seam under every endpoint and client: sockets here, a simulated network in ``staleflow.sim.faults``.

Code that must also run in simulated time takes a ``Transport`` and opens no socket itself; its clock is the loop's.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import zmq

from staleflow.net import addresses
from staleflow.net.allow_list import AllowList
from staleflow.net.dialer import Dialer, dial
from staleflow.net.keyring import Keyring
from staleflow.net.keys import Key
from staleflow.net.limits import TransportLimits
from staleflow.net.listener import Listener, set_router
from staleflow.net.zmq_stream import DrainedSocket
from staleflow.protocols.wire.codec import Data

log = logging.getLogger(__name__)

OnMessage = Callable[[list[bytes], list[memoryview], bool], None]
"""Takes (head, frames, oversize), as described at ``DrainedSocket``. The head: the route, if this side is bound; the
header; if this side is bound with keys, the role and the name of the sender's key, both empty once it is no longer
allowed."""


class Link(Protocol):
    """One side of a connection or a bound socket."""

    def start(self) -> None:
        """Attach to the running loop: messages arrive from now on."""
        ...

    def send(self, parts: Sequence[Data]) -> bool:
        """Queue one message without waiting. Return False when the peer is not connected or its queue is full."""
        ...

    def close(self, linger_ms: int | None = None) -> None:
        """Detach; sent messages still leave within ``linger_ms``. Return at once; idempotent."""
        ...


class Transport(Protocol):
    """Factory of links."""

    def bind(
        self, address: str, *, limits: TransportLimits, on_message: OnMessage, on_drained: Callable[[], None] | None
    ) -> tuple[Link, str]:
        """Return the link of a server, whose messages begin with a route, and its real address. Raise
        ``ConfigError``."""
        ...

    def connect(self, address: str, route: bytes, *, limits: TransportLimits, on_message: OnMessage) -> Link:
        """Return the link of a client, which the server knows as ``route``. It connects and reconnects by itself."""
        ...


class Sockets:
    """The sockets of this machine. With keys every TCP connection is encrypted and both sides are authenticated; Unix
    sockets are protected by the modes of their files."""

    def __init__(self, key: Key | None = None, allowed: AllowList | None = None, *, insecure: bool = False) -> None:
        """``allowed`` is needed to bind with keys. ``insecure`` permits to bind beyond loopback without keys."""
        self.key = key
        self._allowed = allowed
        self._insecure = insecure
        self.on_rejected: Callable[[str, str], None] = _log_rejected
        """Receives address and public key (both may be empty) of each rejected client; the owner may replace it."""

    def bind(
        self, address: str, *, limits: TransportLimits, on_message: OnMessage, on_drained: Callable[[], None] | None
    ) -> tuple[Link, str]:
        if address.startswith("tcp://"):
            return self._listen(address, limits, on_message, on_drained)
        socket = DrainedSocket(zmq.ROUTER, num_heads=2, limits=limits, on_message=on_message, on_drained=on_drained)
        set_router(socket.zmq)
        try:
            return socket, addresses.bind(socket.zmq, address)
        except BaseException:
            socket.close(linger_ms=0)
            raise

    def _listen(
        self, address: str, limits: TransportLimits, on_message: OnMessage, on_drained: Callable[[], None] | None
    ) -> tuple[Link, str]:
        keys = None
        if self.key is not None and self._allowed is not None:
            keys = Keyring(key=self.key, allowed=self._allowed)
        listener = Listener(
            address,
            limits=limits,
            on_message=on_message,
            on_drained=on_drained,
            keys=keys,
            insecure=self._insecure,
            on_rejected=lambda peer, public: self.on_rejected(peer, public),
        )
        if keys is None and not addresses.is_loopback(listener.address):
            log.warning("INSECURE: %s has no keys; anyone who can reach it controls this run", listener.address)
        return listener, listener.address

    def connect(self, address: str, route: bytes, *, limits: TransportLimits, on_message: OnMessage) -> Link:
        if address.startswith("tcp://"):
            return Dialer(address, route, limits=limits, on_message=on_message, key=self.key)
        socket = DrainedSocket(zmq.DEALER, num_heads=1, limits=limits, on_message=on_message)
        try:
            dial(socket.zmq, address, route)
        except BaseException:
            socket.close(0)
            raise
        return socket


def _log_rejected(peer: str, public: str) -> None:
    log.warning("%s rejected: %s", peer or "a connection", describe_rejected(public))


def describe_rejected(public: str) -> str:
    """Describe a rejected client by its key."""
    return f"its key {public[:8]}... is not allowed" if public else "it has no key"


SOCKETS: Final = Sockets()
"""Sockets without keys."""
