"""The server side: one ROUTER, drained on the loop, whose requests become calls.

- ``on_call`` is synchronous and gets each request once; it answers now, or keeps the call and answers later.
- A request that is sent again while its call is pending is dropped; sent again after the answer, it is a new call:
  operations are idempotent.
- A peer not heard from for three heartbeats is gone: its calls are done, unanswered.
- Nothing that a peer sends ends the server or delays another peer: it is refused, counted, and forgotten.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import zmq

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import Data, ProtocolError, decode_request, encode_reply
from staleflow.protocols.wire.messages import Ping, Pong, Refusal, Reply, Request
from staleflow.runtime import address as addresses
from staleflow.runtime.drained import DrainedSocket
from staleflow.runtime.limits import TransportLimits

__all__ = ["Answering", "Call", "Counts", "Endpoint", "Peer", "TransportLimits"]

DEFAULT_LIMITS: Final = TransportLimits()
_PONG: Final = Pong()


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
    busy: int = 0
    """Refused by the transport: too many pending calls or peers."""
    undelivered: int = 0
    """Answers whose peer had left or did not take them."""


class Peer:
    """One connected client: its route, the worker it is, and its pending calls."""

    __slots__ = ("gone", "name", "pending", "route", "seen_s")

    def __init__(self, route: bytes, seen_s: float) -> None:
        self.route = route
        self.name = name_of(route)
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

    __slots__ = ("_from", "_to", "answered", "body", "frames", "id")

    def __init__(self, to: Answering, peer: Peer, id: int, body: Request, frames: list[memoryview]) -> None:
        self._to = to
        self._from = peer
        self.id = id
        self.body = body
        self.frames = frames
        """Raw frames: views of the transport's memory, valid as long as they are kept."""
        self.answered = False

    @property
    def peer(self) -> str:
        """Who asks: its ``WorkerId``."""
        return self._from.name

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
        limits: TransportLimits = DEFAULT_LIMITS,
    ) -> None:
        self.counts = Counts()
        self._on_call = on_call
        self._on_gone = on_gone
        self._on_reject = on_reject
        self._limits = limits
        self._peers: dict[bytes, Peer] = {}
        self._closed = asyncio.Event()
        self._socket = DrainedSocket(
            zmq.ROUTER,
            num_heads=2,
            limits=limits,
            on_message=self._receive,
            on_drained=on_drained,
        )
        self._socket.zmq.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.zmq.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.zmq.set(zmq.BACKLOG, 1_024)
        try:
            self.address = addresses.bind(self._socket.zmq, bind)
        except BaseException:
            self._socket.close(linger_ms=0)
            raise

    @property
    def peers(self) -> list[str]:
        """Who is there, by name."""
        return [peer.name for peer in self._peers.values()]

    async def serve(self) -> None:
        """Serve until ``close``. What was answered before that still leaves."""
        if self._closed.is_set():
            return
        self._socket.start()
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
        self._socket.close()
        self._closed.set()

    def _receive(self, head: list[bytes], frames: list[memoryview], oversize: bool) -> None:
        route, header = head
        try:
            id, body = decode_request(header)
        except ProtocolError as error:
            self._reject(route, error.id, error.code, error.detail)
            return
        if oversize:
            limits = self._limits
            allowed = f"{limits.max_message_bytes} bytes in {limits.max_frames} frames"
            self._reject(route, id, Code.OVERSIZE, f"a message has at most {allowed}")
            return
        if (peer := self._peers.get(route)) is None and (peer := self._welcome(route, id)) is None:
            return
        peer.seen_s = time.monotonic()
        if type(body) is Ping:
            self.counts.pings += 1
            self._send(route, id, _PONG)
            return
        pending = peer.pending
        if id in pending:
            self.counts.repeated += 1
            return
        if len(pending) >= self._limits.max_pending:
            self._busy(route, id, f"{len(pending)} calls of this peer wait for their answers")
            return
        call = pending[id] = Call(self, peer, id, body, frames)
        self.counts.calls += 1
        self._on_call(call)

    def answer(self, peer: Peer, id: int, body: Reply, frames: Sequence[Data]) -> None:
        """For its calls: they are answered through ``Call.reply``."""
        peer.pending.pop(id, None)
        if not peer.gone:
            self.counts.replies += 1
            self._send(peer.route, id, body, frames)

    def _send(self, route: bytes, id: int, body: Reply, frames: Sequence[Data] = ()) -> None:
        if not self._socket.send((route, encode_reply(id, body), *frames)):
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

    def _busy(self, route: bytes, id: int, detail: str) -> None:
        self.counts.busy += 1
        self._send(route, id, Refusal(code=Code.BUSY, detail=detail, retry_after_ms=1_000))

    def _welcome(self, route: bytes, id: int) -> Peer | None:
        if len(self._peers) >= self._limits.max_peers:
            self._busy(route, id, f"{len(self._peers)} peers are attached")
            return None
        peer = self._peers[route] = Peer(route, time.monotonic())
        return peer

    def _sweep_later(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._limits.heartbeat_s / 2
        loop.call_at(due_s, self._sweep, due_s)

    def _sweep(self, due_s: float) -> None:
        """Find the peers that are gone. A sweep that is late itself proves nothing: their messages may lie unread."""
        if self._closed.is_set():
            return
        self._sweep_later()
        if asyncio.get_running_loop().time() < due_s + self._limits.heartbeat_s / 2:
            self._forget_silent(time.monotonic() - self._limits.silence_s)

    def _forget_silent(self, before_s: float) -> None:
        for peer in [peer for peer in self._peers.values() if peer.seen_s < before_s]:
            del self._peers[peer.route]
            peer.gone = True
            peer.pending.clear()
            if self._on_gone is not None and all(other.name != peer.name for other in self._peers.values()):
                self._on_gone(peer.name)


def name_of(route: bytes) -> str:
    """The worker behind a route ``<worker>/<connection>``; a route of another form is its own name."""
    return (route.rpartition(b"/")[0] or route).decode("utf-8", "backslashreplace")
