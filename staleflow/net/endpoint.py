"""The server side: one ROUTER, drained on the loop, whose requests become calls.

- ``on_call`` is synchronous and receives each request once; it replies at once, or keeps the call and replies later.
- A request that is sent again while its call is pending is dropped. Sent again after the reply it is a new call:
  operations are idempotent.
- A peer that sent nothing for three heartbeats is gone: its calls end without a reply.
- Messages left unread by a connection that another one replaced are dropped: the peer sends them again by the new one.
- No message of a peer ends the server or delays another peer: a bad message is refused, counted and discarded.
- With keys, the requests that a peer may send depend on the role of its key (``permissions``), and a name belongs to
  one key while its owner is connected. The key of an observer reserves no name, so it locks out no other peer.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from staleflow.configs.durable_files import make_folder
from staleflow.configs.errors import ConfigError
from staleflow.net import addresses
from staleflow.net.limits import TransportLimits
from staleflow.net.permissions import Role, denial_reason
from staleflow.net.security import OBSERVER_ROLES
from staleflow.net.transport import SOCKETS, Transport
from staleflow.net.zmq_stream import DrainedSocket
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import Data, ProtocolError, decode_request, encode_reply, id_of
from staleflow.protocols.wire.messages import Ping, Pong, Refusal, Reply, Request

__all__ = ["Call", "Counts", "Endpoint", "Peer", "Replier", "TransportLimits"]

log = logging.getLogger(__name__)

DEFAULT_LIMITS: Final = TransportLimits()
LOG_INTERVAL_S: Final = 1.0
"""Minimum interval between two log lines about denied requests."""
_RENAMED: Final = b"\0"
"""First byte of a name that ZeroMQ generated: for a connection that another one replaced, or that came without a
name."""
_PONG: Final = Pong()
_ROLES: Final = {role.encode(): role for role in Role}
_OBSERVERS: Final = tuple(role.encode() for role in OBSERVER_ROLES)
_NO_KEYS: Final[list[bytes]] = []


@dataclass(slots=True)
class Counts:
    """Counters of an endpoint since its start."""

    calls: int = 0
    replies: int = 0
    pings: int = 0
    repeated: int = 0
    """Requests sent again while their call was pending."""
    malformed: int = 0
    oversize: int = 0
    nameless: int = 0
    """Dropped messages of connections without a name of their own, or whose name another connection has taken over."""
    denied: int = 0
    """Requests of peers whose key does not allow them."""
    busy: int = 0
    """Requests refused by the transport: too many pending calls or peers."""
    undelivered: int = 0
    """Replies whose peer had left or did not read them."""


class Peer:
    """One connected client: its route, worker name, key (if it has one) and pending calls."""

    __slots__ = ("gone", "key", "name", "owns_name", "pending", "route", "seen_s")

    def __init__(self, route: bytes, seen_s: float, key: list[bytes]) -> None:
        self.route = route
        self.key = key
        self.name = name_of(route)
        self.owns_name = not key or key[0] not in _OBSERVERS
        """True if its key reserves its name while it is connected."""
        self.pending: dict[int, Call] = {}
        self.seen_s = seen_s
        self.gone = False


class Replier(Protocol):
    """Sends the reply of a call to its peer."""

    def answer(self, peer: Peer, id: int, body: Reply, frames: Sequence[Data]) -> None:
        """Send ``body`` to ``peer`` as the reply to its call ``id``. No effect if the peer is gone."""
        ...


class Call:
    """One request that waits for its reply. Keep it to reply later."""

    __slots__ = ("_from", "_to", "answered", "body", "frames", "id", "nbytes")

    def __init__(
        self, to: Replier, peer: Peer, id: int, body: Request, frames: list[memoryview], header_bytes: int = 0
    ) -> None:
        self._to = to
        self._from = peer
        self.id = id
        self.body = body
        self.frames = frames
        """Raw frames: views of the transport's memory, valid as long as they are referenced."""
        self.nbytes = header_bytes + sum(frame.nbytes for frame in frames) if frames else header_bytes
        """Size of the whole message."""
        self.answered = False

    @property
    def peer(self) -> str:
        """The ``WorkerId`` of the sender."""
        return self._from.name

    @property
    def key(self) -> str:
        """Role and name of the peer's key; empty without keys."""
        return key_text(self._from.key)

    @property
    def role(self) -> str:
        """Role of the peer's key; empty without keys."""
        return self._from.key[0].decode() if self._from.key else ""

    @property
    def route(self) -> str:
        """The connection of the request, the same for every repetition of it; its request ids never decrease."""
        return self._from.route.decode("utf-8", "backslashreplace")

    @property
    def done(self) -> bool:
        """True once no reply is needed: already sent, or the peer is gone."""
        return self.answered or self._from.gone

    def reply(self, body: Reply, frames: Sequence[Data] = ()) -> None:
        """Send the reply, once. Frames are not copied: do not change their bytes afterwards. No effect if the peer
        left."""
        if self.answered:
            raise RuntimeError(f"call {self.id} of {self.peer} got a second reply, {type(body).__name__}")
        self.answered = True
        self._to.answer(self._from, self.id, body, frames)

    def refuse(self, code: Code, detail: str = "", retry_after_ms: int = 0) -> None:
        """Reply with a refusal."""
        self.reply(Refusal(code=code, detail=detail, retry_after_ms=retry_after_ms))


class Endpoint:
    """Binds at construction (``ConfigError`` on failure); calls arrive once ``serve`` runs."""

    def __init__(
        self,
        bind: str,
        *,
        on_call: Callable[[Call], None],
        on_drained: Callable[[], None] | None = None,
        on_gone: Callable[[str], None] | None = None,
        on_reject: Callable[[str, Code, str], None] | None = None,
        on_denied: Callable[[str, str], None] | None = None,
        name_conflict: Callable[[str, Role, str], str | None] | None = None,
        limits: TransportLimits = DEFAULT_LIMITS,
        transport: Transport = SOCKETS,
    ) -> None:
        """``on_denied`` receives the peer and the verb. ``name_conflict`` receives a new peer's name, its key's role
        and its key, and returns why the peer may not use that name, or None."""
        self.counts = Counts()
        self._on_call = on_call
        self._on_gone = on_gone
        self._on_reject = on_reject
        self._on_denied = on_denied
        self._name_conflict = name_conflict
        self._log_denied_s = 0.0
        self._limits = limits
        self._peers: dict[bytes, Peer] = {}
        self._keys: dict[str, list[bytes]] = {}
        """Keys of connected peers that own their names, by name."""
        self._held_bytes = 0
        """Size of all pending calls."""
        self._closed = asyncio.Event()
        self._now_s: Callable[[], float] = lambda: 0.0  # the loop's clock, once there is a loop
        self._link, self.address = transport.bind(bind, limits=limits, on_message=self._receive, on_drained=on_drained)

    @property
    def peers(self) -> list[str]:
        """Names of the connected peers."""
        return [peer.name for peer in self._peers.values()]

    async def serve(self) -> None:
        """Serve until ``close``. Replies sent before that are still delivered."""
        if self._closed.is_set():
            return
        self._now_s = asyncio.get_running_loop().time
        self._link.start()
        self._sweep_later()
        try:
            await self._closed.wait()
        finally:
            self.close()

    def close(self) -> None:
        """End ``serve``; every pending call ends without a reply. Idempotent."""
        for peer in self._peers.values():
            peer.gone = True
        self._peers.clear()
        self._link.close()
        self._closed.set()

    def _receive(self, head: list[bytes], frames: list[memoryview], oversize: bool) -> None:
        route, header = head[:2]
        if route.startswith(_RENAMED):
            self.counts.nameless += 1
            return
        key = head[2:] or _NO_KEYS
        limits = self._limits
        if len(header) > limits.max_header_bytes:
            actual = f"a header of {len(header)} bytes; at most {limits.max_header_bytes}"
            self._reject(route, id_of(header), Code.OVERSIZE, actual)
            return
        try:
            id, body = decode_request(header)
        except ProtocolError as error:
            self._reject(route, error.id, error.code, error.detail)
            return
        if oversize:
            allowed = f"{limits.max_message_bytes} bytes in {limits.max_frames} frames"
            self._reject(route, id, Code.OVERSIZE, f"a message has at most {allowed}")
            return
        # Before _add_peer: a denied request must neither create a peer nor reserve a name.
        if key is not _NO_KEYS and (why := self._denial_reason(route, key, body)) is not None:
            self._deny(route, id, type(body).__name__, why)
            return
        if (peer := self._peers.get(route)) is None and (peer := self._add_peer(route, id, key)) is None:
            return
        peer.seen_s = self._now_s()
        if type(body) is Ping:
            self.counts.pings += 1
            self._send(route, id, _PONG)
            return
        pending = peer.pending
        if id in pending:
            self.counts.repeated += 1
            return
        if len(pending) >= limits.max_pending:
            self._busy(route, id, f"{len(pending)} calls of this peer are pending; retry later")
            return
        call = Call(self, peer, id, body, frames, len(header))
        if self._held_bytes + call.nbytes > limits.max_held_bytes:
            self._busy(route, id, f"pending calls hold {self._held_bytes} bytes; retry later")
            return
        pending[id] = call
        self._held_bytes += call.nbytes
        self.counts.calls += 1
        self._on_call(call)

    def answer(self, peer: Peer, id: int, body: Reply, frames: Sequence[Data]) -> None:
        """Send the reply of a call. Called by ``Call.reply``."""
        if (call := peer.pending.pop(id, None)) is not None:
            self._held_bytes -= call.nbytes
        if not peer.gone:
            self.counts.replies += 1
            self._send(peer.route, id, body, frames)

    def _send(self, route: bytes, id: int, body: Reply, frames: Sequence[Data] = ()) -> None:
        if not self._link.send((route, encode_reply(id, body), *frames)):
            self.counts.undelivered += 1

    def _reject(self, route: bytes, id: int, code: Code, detail: str) -> None:
        """Refuse and count a message that could not be read."""
        if code is Code.OVERSIZE:
            self.counts.oversize += 1
        else:
            self.counts.malformed += 1
        self._send(route, id, Refusal(code=code, detail=detail))
        if self._on_reject is not None:
            self._on_reject(name_of(route), code, detail)

    def _denial_reason(self, route: bytes, key: list[bytes], body: Request) -> str | None:
        """Return why the holder of ``key`` may not send ``body`` under its name; None if it may."""
        name = name_of(route)
        if (role := _ROLES.get(key[0])) is None:
            return f"the key of {name} is no longer allowed"
        if (peer := self._peers.get(route)) is not None:
            return denial_reason(role, name, body) if peer.key == key else f"{name} has another key"
        if self._keys.get(name, key) != key:
            return f"{name} has another key"
        if self._name_conflict is not None and (why := self._name_conflict(name, role, key_text(key))) is not None:
            return why
        return denial_reason(role, name, body)

    def _deny(self, route: bytes, id: int, verb: str, why: str) -> None:
        self.counts.denied += 1
        self._send(route, id, Refusal(code=Code.DENIED, detail=why))
        if self._now_s() >= self._log_denied_s:
            self._log_denied_s = self._now_s() + LOG_INTERVAL_S
            log.warning("denied: %s (%d so far)", why, self.counts.denied)
        if self._on_denied is not None:
            self._on_denied(name_of(route), verb)

    def _busy(self, route: bytes, id: int, detail: str) -> None:
        self.counts.busy += 1
        self._send(route, id, Refusal(code=Code.BUSY, detail=detail, retry_after_ms=1_000))

    def _add_peer(self, route: bytes, id: int, key: list[bytes]) -> Peer | None:
        if len(self._peers) >= self._limits.max_peers:
            self._busy(route, id, f"{len(self._peers)} peers are attached")
            return None
        peer = self._peers[route] = Peer(route, self._now_s(), key)
        if peer.owns_name:
            self._keys[peer.name] = key
        return peer

    def _sweep_later(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._limits.heartbeat_s / 2
        loop.call_at(due_s, self._sweep, due_s)

    def _sweep(self, due_s: float) -> None:
        """Forget silent peers. A late sweep proves nothing: messages may wait unread, and a peer that gave this server
        up during its pause needs the rest of its time to reconnect."""
        if self._closed.is_set():
            return
        self._sweep_later()
        self._restore_socket()
        now_s = self._now_s()
        if now_s < due_s + self._limits.heartbeat_s / 2:
            self._forget_silent(now_s - self._limits.silence_s)
            return
        for peer in self._peers.values():
            peer.seen_s = min(peer.seen_s + now_s - due_s, now_s)

    def _restore_socket(self) -> None:
        """Bind a Unix socket again whose file was deleted; otherwise no other process could connect."""
        path = Path(self.address.removeprefix("ipc://"))
        if not (self.address.startswith("ipc://") and isinstance(self._link, DrainedSocket)) or path.exists():
            return
        log.error("socket %s was deleted while this server listens on it; recreating it", path)
        try:
            make_folder(path.parent, 0o700)
            addresses.bind(self._link.zmq, self.address)
        except (ConfigError, OSError) as error:
            log.error("socket %s cannot be recreated: %s", path, error)

    def _forget_silent(self, before_s: float) -> None:
        for peer in [peer for peer in self._peers.values() if peer.seen_s < before_s]:
            del self._peers[peer.route]
            peer.gone = True
            self._held_bytes -= sum(call.nbytes for call in peer.pending.values())
            peer.pending.clear()
            # The worker may have reconnected by another route: then its name is not free, and it is not gone.
            if any(other.name == peer.name and other.owns_name >= peer.owns_name for other in self._peers.values()):
                continue
            self._keys.pop(peer.name, None)
            if self._on_gone is not None:
                self._on_gone(peer.name)


def key_text(key: list[bytes]) -> str:
    """Return role and name of a key, for the log and for comparisons; empty without keys."""
    return b"/".join(key).decode("utf-8", "backslashreplace")


def name_of(route: bytes) -> str:
    """Return the worker behind a route ``<worker>/<connection>``; a route of another form is its own name."""
    return (route.rpartition(b"/")[0] or route).decode("utf-8", "backslashreplace")
