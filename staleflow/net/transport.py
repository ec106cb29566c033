"""The seam under every endpoint and client: sockets here, a simulated network in ``staleflow.sim.faults``.

Whoever must also run in simulated time is given a ``Transport`` and opens no socket itself; time it asks of its loop.
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
"""Takes (head, frames, oversize), as ``DrainedSocket`` says. The head: the route, if this side is bound; the header; if
this side is bound with keys, the role and the name of the sender's key, both empty when it is not allowed any more."""


class Link(Protocol):
    """One side of a transport, as its owner sees it."""

    def start(self) -> None:
        """Attach to the running loop: messages come from now on."""
        ...

    def send(self, parts: Sequence[Data]) -> bool:
        """Queue one message, never waiting. False when the peer is not there or its queue is full."""
        ...

    def close(self, linger_ms: int | None = None) -> None:
        """Detach; what was sent still leaves within ``linger_ms``. Returns at once; may be called again."""
        ...


class Transport(Protocol):
    """Where links come from."""

    def bind(
        self, address: str, *, limits: TransportLimits, on_message: OnMessage, on_drained: Callable[[], None] | None
    ) -> tuple[Link, str]:
        """The side of a server, whose messages begin with a route, and its real address. ``ConfigError``."""
        ...

    def connect(self, address: str, route: bytes, *, limits: TransportLimits, on_message: OnMessage) -> Link:
        """The side of a client, which the server knows as ``route``. It connects, and connects again, by itself."""
        ...


class Sockets:
    """The sockets of this machine. With keys every TCP connection is encrypted and both sides are known; Unix sockets
    are guarded by the modes of their files."""

    def __init__(self, key: Key | None = None, allowed: AllowList | None = None, *, insecure: bool = False) -> None:
        """``allowed``: to bind. ``insecure``: may bind beyond loopback without keys."""
        self.key = key
        self._allowed = allowed
        self._insecure = insecure
        self.on_stranger: Callable[[str, str], None] = _told
        """Gets address and public key (both may be empty) of who was turned away; the owner may set it."""

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
            on_stranger=lambda peer, public: self.on_stranger(peer, public),
        )
        if keys is None and not addresses.is_loopback(listener.address):
            log.warning("INSECURE: %s has no keys; anybody who reaches it owns this run", listener.address)
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


def _told(peer: str, public: str) -> None:
    log.warning("%s is turned away: %s", peer or "a connection", stranger(public))


def stranger(public: str) -> str:
    """Who that was, by the key it came with."""
    return f"its key {public[:8]}... is not allowed" if public else "it has no key"


SOCKETS: Final = Sockets()
"""Without keys."""
