"""The server side: one ROUTER, drained on the loop, whose requests become calls.

- ``on_call`` is synchronous and gets each request once; it answers now, or keeps the call and answers later.
- A request that is sent again while its call is pending is dropped; sent again after the answer, it is a new call:
  operations are idempotent.
- A peer not heard from for three heartbeats is gone: its calls are done, unanswered.
- What a connection left unread when another replaced it is dropped: its peer sends that again by the new one.
- Nothing that a peer sends ends the server or delays another peer: it is refused, counted, and forgotten.
- With keys, what a peer may ask depends on the role of its key (``roles``), and a name belongs to one key while its
  owner is there. A key that only looks makes no name its own, so that it keeps nobody from his.
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
from staleflow.net.permissions import Role, objection
from staleflow.net.security import LOOKING
from staleflow.net.transport import SOCKETS, Transport
from staleflow.net.zmq_stream import DrainedSocket
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import Data, ProtocolError, decode_request, encode_reply, id_of
from staleflow.protocols.wire.messages import Ping, Pong, Refusal, Reply, Request

__all__ = ["Answering", "Call", "Counts", "Endpoint", "Peer", "TransportLimits"]

log = logging.getLogger(__name__)

DEFAULT_LIMITS: Final = TransportLimits()
LOG_INTERVAL_S: Final = 1.0
"""Of what is denied."""
_RENAMED: Final = b"\0"
"""Begins a name that ZeroMQ gave: to a connection that another one replaced, or that came without a name."""
_PONG: Final = Pong()
_ROLES: Final = {role.encode(): role for role in Role}
_LOOKING: Final = tuple(role.encode() for role in LOOKING)
_NO_KEYS: Final[list[bytes]] = []


@dataclass(slots=True)
class Counts:
    """What an endpoint has seen since it started."""

    calls: int = 0
    replies: int = 0
    pings: int = 0
    repeated: int = 0
    """Requests sent again while their call was pending."""
    malformed: int = 0
    oversize: int = 0
    nameless: int = 0
    """Messages of connections that have no name of their own, or whose name another one has taken: dropped."""
    denied: int = 0
    """Requests of peers whose key does not allow them."""
    busy: int = 0
    """Refused by the transport: too many pending calls or peers."""
    undelivered: int = 0
    """Answers whose peer had left or did not take them."""


class Peer:
    """One connected client: its route, the worker it is, its key if it has one, and its pending calls."""

    __slots__ = ("gone", "key", "name", "owns", "pending", "route", "seen_s")

    def __init__(self, route: bytes, seen_s: float, key: list[bytes]) -> None:
        self.route = route
        self.key = key
        self.name = name_of(route)
        self.owns = not key or key[0] not in _LOOKING
        """Its name is its key's while it is there."""
        self.pending: dict[int, Call] = {}
        self.seen_s = seen_s
        self.gone = False


class Answering(Protocol):
    """Who brings an answer to the peer that asked."""

    def answer(self, peer: Peer, id: int, body: Reply, frames: Sequence[Data]) -> None:
        """Send ``body`` to ``peer`` as the answer to its call ``id``; no effect if the peer is gone."""
        ...


class Call:
    """One request that waits for its answer. Keep it to answer later."""

    __slots__ = ("_from", "_to", "answered", "body", "frames", "id", "nbytes")

    def __init__(
        self, to: Answering, peer: Peer, id: int, body: Request, frames: list[memoryview], header_bytes: int = 0
    ) -> None:
        self._to = to
        self._from = peer
        self.id = id
        self.body = body
        self.frames = frames
        """Raw frames: views of the transport's memory, valid as long as they are kept."""
        self.nbytes = header_bytes + sum(frame.nbytes for frame in frames) if frames else header_bytes
        """Of the whole message."""
        self.answered = False

    @property
    def peer(self) -> str:
        """Who asks: its ``WorkerId``."""
        return self._from.name

    @property
    def key(self) -> str:
        """Role and name of the key that the peer came with; empty without keys."""
        return key_text(self._from.key)

    @property
    def role(self) -> str:
        """Of the peer's key; empty without keys."""
        return self._from.key[0].decode() if self._from.key else ""

    @property
    def route(self) -> str:
        """The connection it came by, the same for every echo of it; its ids never go back."""
        return self._from.route.decode("utf-8", "backslashreplace")

    @property
    def done(self) -> bool:
        """Nobody waits any more: answered, or the peer is gone."""
        return self.answered or self._from.gone

    def reply(self, body: Reply, frames: Sequence[Data] = ()) -> None:
        """Answer, once. Frames are not copied: nobody may change their bytes afterwards. No effect if the peer left."""
        if self.answered:
            raise RuntimeError(f"call {self.id} of {self.peer} is answered a second time, with {type(body).__name__}")
        self.answered = True
        self._to.answer(self._from, self.id, body, frames)

    def refuse(self, code: Code, detail: str = "", retry_after_ms: int = 0) -> None:
        """Answer with a normal no."""
        self.reply(Refusal(code=code, detail=detail, retry_after_ms=retry_after_ms))


class Endpoint:
    """Binds at once (``ConfigError`` if that cannot be); calls come once ``serve`` runs."""

    def __init__(
        self,
        bind: str,
        *,
        on_call: Callable[[Call], None],
        on_drained: Callable[[], None] | None = None,
        on_gone: Callable[[str], None] | None = None,
        on_reject: Callable[[str, Code, str], None] | None = None,
        on_denied: Callable[[str, str], None] | None = None,
        not_its_name: Callable[[str, Role, str], str | None] | None = None,
        limits: TransportLimits = DEFAULT_LIMITS,
        transport: Transport = SOCKETS,
    ) -> None:
        """``on_denied`` gets the peer and the verb; ``not_its_name`` a new peer's name, its key's role and its key, and
        says why it may not come by that name, or None."""
        self.counts = Counts()
        self._on_call = on_call
        self._on_gone = on_gone
        self._on_reject = on_reject
        self._on_denied = on_denied
        self._not_its_name = not_its_name
        self._log_denied_s = 0.0
        self._limits = limits
        self._peers: dict[bytes, Peer] = {}
        self._keys: dict[str, list[bytes]] = {}
        """Of those who are there and own their names, by name."""
        self._held_bytes = 0
        """Of all pending calls."""
        self._closed = asyncio.Event()
        self._now_s: Callable[[], float] = lambda: 0.0  # that of the loop, once there is one
        self._link, self.address = transport.bind(bind, limits=limits, on_message=self._receive, on_drained=on_drained)

    @property
    def peers(self) -> list[str]:
        """Who is there, by name."""
        return [peer.name for peer in self._peers.values()]

    async def serve(self) -> None:
        """Serve until ``close``. What was answered before that still leaves."""
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
        """End ``serve``; every pending call is done, unanswered. May be called again."""
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
            had = f"a header of {len(header)} bytes; at most {limits.max_header_bytes} are read"
            self._reject(route, id_of(header), Code.OVERSIZE, had)
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
        if key is not _NO_KEYS and (why := self._objection(route, key, body)) is not None:
            self._deny(route, id, type(body).__name__, why)
            return
        if (peer := self._peers.get(route)) is None and (peer := self._welcome(route, id, key)) is None:
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
            self._busy(route, id, f"{len(pending)} calls of this peer wait for their answers")
            return
        call = Call(self, peer, id, body, frames, len(header))
        if self._held_bytes + call.nbytes > limits.max_held_bytes:
            self._busy(route, id, f"calls that wait hold {self._held_bytes} bytes")
            return
        pending[id] = call
        self._held_bytes += call.nbytes
        self.counts.calls += 1
        self._on_call(call)

    def answer(self, peer: Peer, id: int, body: Reply, frames: Sequence[Data]) -> None:
        """For its calls: they are answered through ``Call.reply``."""
        if (call := peer.pending.pop(id, None)) is not None:
            self._held_bytes -= call.nbytes
        if not peer.gone:
            self.counts.replies += 1
            self._send(peer.route, id, body, frames)

    def _send(self, route: bytes, id: int, body: Reply, frames: Sequence[Data] = ()) -> None:
        if not self._link.send((route, encode_reply(id, body), *frames)):
            self.counts.undelivered += 1

    def _reject(self, route: bytes, id: int, code: Code, detail: str) -> None:
        """Answer what could not be read, and count it."""
        if code is Code.OVERSIZE:
            self.counts.oversize += 1
        else:
            self.counts.malformed += 1
        self._send(route, id, Refusal(code=code, detail=detail))
        if self._on_reject is not None:
            self._on_reject(name_of(route), code, detail)

    def _objection(self, route: bytes, key: list[bytes], body: Request) -> str | None:
        """Why the holder of that key may not ask this under that name."""
        name = name_of(route)
        if (role := _ROLES.get(key[0])) is None:
            return f"the key of {name} is not allowed any more"
        if (peer := self._peers.get(route)) is not None:
            return objection(role, name, body) if peer.key == key else f"{name} has another key"
        if self._keys.get(name, key) != key:
            return f"{name} has another key"
        if self._not_its_name is not None and (why := self._not_its_name(name, role, key_text(key))) is not None:
            return why
        return objection(role, name, body)

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

    def _welcome(self, route: bytes, id: int, key: list[bytes]) -> Peer | None:
        if len(self._peers) >= self._limits.max_peers:
            self._busy(route, id, f"{len(self._peers)} peers are attached")
            return None
        peer = self._peers[route] = Peer(route, self._now_s(), key)
        if peer.owns:
            self._keys[peer.name] = key
        return peer

    def _sweep_later(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._limits.heartbeat_s / 2
        loop.call_at(due_s, self._sweep, due_s)

    def _sweep(self, due_s: float) -> None:
        """Find the peers that are gone. A sweep that is late itself proves nothing: their messages may lie unread, and
        a peer that gave this server up during its pause needs the rest of its time to connect again."""
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
        """Bind a Unix socket again whose file was deleted: no other process could connect any more."""
        path = Path(self.address.removeprefix("ipc://"))
        if not (self.address.startswith("ipc://") and isinstance(self._link, DrainedSocket)) or path.exists():
            return
        log.error("%s was deleted while this server listens there; it is made again", path)
        try:
            make_folder(path.parent, 0o700)
            addresses.bind(self._link.zmq, self.address)
        except (ConfigError, OSError) as error:
            log.error("%s cannot be made again: %s", path, error)

    def _forget_silent(self, before_s: float) -> None:
        for peer in [peer for peer in self._peers.values() if peer.seen_s < before_s]:
            del self._peers[peer.route]
            peer.gone = True
            self._held_bytes -= sum(call.nbytes for call in peer.pending.values())
            peer.pending.clear()
            if any(other.name == peer.name and other.owns >= peer.owns for other in self._peers.values()):
                continue
            self._keys.pop(peer.name, None)
            if self._on_gone is not None:
                self._on_gone(peer.name)


def key_text(key: list[bytes]) -> str:
    """Role and name of a key, for the log and to compare; empty without keys."""
    return b"/".join(key).decode("utf-8", "backslashreplace")


def name_of(route: bytes) -> str:
    """The worker behind a route ``<worker>/<connection>``; a route of another form is its own name."""
    return (route.rpartition(b"/")[0] or route).decode("utf-8", "backslashreplace")
