"""A ZeroMQ socket on an asyncio loop, by its file descriptor: the one transport under every server and client.

``zmq.asyncio`` is not used: it costs a future and a poll per message, three to five times the cost of draining the
descriptor.

The descriptor is edge-triggered: it signals "something changed" once. So the socket is polled again after every drain
and every send; otherwise messages would stay in it unread. A drain handles at most ``burst_messages``, then lets the
loop's timers run and continues.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import zmq

from staleflow.net.limits import TransportLimits
from staleflow.protocols.wire.codec import Data

MAX_SOCKETS: Final = 16_384
"""Maximum number of sockets of one process."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBLOCK_MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_RCVMORE: Final = int(zmq.RCVMORE)
_POLLIN: Final = int(zmq.POLLIN)
# Plain integers: combining ZeroMQ's flag enums takes longer than sending a message.

_open: Final[set[int]] = set()
"""Open sockets of this process, by identity."""
_own: Final["list[zmq.Context[zmq.Socket[bytes]]]"] = []
"""Contexts besides the shared one."""


Sender = Callable[[zmq.Frame, list[int]], Sequence[bytes]]
"""Maps the first part after the route, and the sizes of all parts but the route, to parts of the head."""


class Tracker(Protocol):
    """ZeroMQ's message tracker of one frame."""

    @property
    def done(self) -> bool:
        """True once ZeroMQ has sent or discarded the frame."""
        ...


class SendBudget:
    """Memory budget of large frames that were sent and that their peers have not read yet, by route.

    ZeroMQ bounds the queue of a peer in messages only, and a message may be as large as a chunk of weights. Large
    frames are sent without a copy, so the end of a frame is known from ZeroMQ's release of its memory.
    """

    def __init__(self, max_of_one: int, max_of_all: int) -> None:
        self._max_of_one = max_of_one
        self._max_of_all = max_of_all
        self._frames: dict[bytes, deque[tuple[Tracker, int]]] = {}
        self._nbytes: dict[bytes, int] = {}

    @property
    def nbytes(self) -> int:
        """Size of the frames in flight of all peers, as of their last check."""
        return sum(self._nbytes.values())

    def has_room(self, route: bytes, nbytes: int) -> bool:
        """Return whether ``nbytes`` more may be sent to a peer. A peer that has read everything always gets one
        reply."""
        self._release_sent(route)
        if not (pending := self._nbytes.get(route, 0)):
            return True
        return pending + nbytes <= self._max_of_one and self.nbytes + nbytes <= self._max_of_all

    def sent(self, route: bytes, tracker: Tracker, nbytes: int) -> None:
        """Record a large frame in flight."""
        if route not in self._frames:
            # routes of closed connections are never queried again, so release their finished frames here
            for other in list(self._frames):
                self._release_sent(other)
            self._frames[route], self._nbytes[route] = deque(), 0
        self._frames[route].append((tracker, nbytes))
        self._nbytes[route] += nbytes

    def _release_sent(self, route: bytes) -> None:
        frames = self._frames.get(route)
        if frames is None:
            return
        while frames and frames[0][0].done:
            self._nbytes[route] -= frames.popleft()[1]
        if not frames:
            del self._frames[route], self._nbytes[route]


def context() -> "zmq.Context[zmq.Socket[bytes]]":
    """Return the ZeroMQ context of this process."""
    shared = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
    shared.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return shared


def own_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """Return a new context. A context has one ZAP handler, and that handler belongs to one endpoint."""
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    own.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    _own.append(own)
    return own


def end_context() -> None:
    """Wait until closed sockets have delivered or their linger time is over. No effect while a socket is open."""
    if not _open:
        zmq.Context.instance().term()
        while _own:
            _own.pop().term()


class DrainedSocket:
    """A socket that passes each message to ``on_message(head, frames, oversize)``, in order, on the loop's thread.

    The head is the first ``num_heads`` parts, as bytes; the frames are the others, as views of ZeroMQ's own memory. A
    message beyond the limits comes with the frames that fit and ``oversize`` set. ``on_drained`` runs after each drain
    that handled a message. ``sender``, for a ROUTER, adds the sender's identity to the head.
    """

    def __init__(
        self,
        kind: int,
        *,
        num_heads: int,
        limits: TransportLimits,
        on_message: Callable[[list[bytes], list[memoryview], bool], None],
        on_drained: Callable[[], None] | None = None,
        sender: Sender | None = None,
        within: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        self._limits = limits
        self._num_heads = num_heads
        self._on_message = on_message
        self._on_drained = on_drained
        self._sender = sender
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._draining = False
        self._budget = SendBudget(limits.max_unread_bytes, limits.max_all_unread_bytes) if kind == zmq.ROUTER else None
        self.zmq = (within or context()).socket(kind)
        self.zmq.set(zmq.SNDHWM, limits.send_queue)
        self.zmq.set(zmq.RCVHWM, limits.receive_queue)
        self.zmq.set(zmq.MAXMSGSIZE, limits.max_message_bytes)
        self.zmq.set(zmq.LINGER, limits.linger_ms)
        _open.add(id(self))
        self._recv = self.zmq.recv
        self._get = self.zmq.get

    def start(self) -> None:
        """Attach to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.zmq.fileno(), self._drain)
        self.poll_soon()

    def close(self, linger_ms: int | None = None) -> None:
        """Detach and close; sent messages still leave within ``linger_ms``. Return at once; idempotent."""
        if self.zmq.closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.zmq.fileno())
        self.zmq.close(self._limits.linger_ms if linger_ms is None else linger_ms)
        _open.discard(id(self))

    def send(self, parts: Sequence[Data]) -> bool:
        """Queue one message without waiting. Return False when the peer is not connected, its queue is full, or a
        ROUTER's peer has not read earlier messages."""
        last = len(parts) - 1
        copy_below = self._limits.copy_below_bytes
        sizes = [part.nbytes if isinstance(part, memoryview) else len(part) for part in parts]
        large = 0
        if self._budget is not None and max(sizes) >= copy_below:
            large = sum(size for size in sizes if size >= copy_below)
        route = bytes(parts[0]) if large else b""
        if large and self._budget is not None and not self._budget.has_room(route, large):
            return False
        try:
            for index, (part, size) in enumerate(zip(parts, sizes, strict=True)):
                flags = _NOBLOCK_MORE if index < last else _NOBLOCK
                tracker = self.zmq.send(part, flags, copy=size < copy_below, track=bool(large) and size >= copy_below)
                if tracker is not None and self._budget is not None:
                    self._budget.sent(route, tracker, size)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        finally:
            # Sending processes ZeroMQ's events and so may consume the edge of a message that has just arrived.
            if not self._draining:
                self.poll_soon()
        return True

    def poll_soon(self) -> None:
        """Poll the socket in the next turn of the loop."""
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _events(self) -> int:
        return cast("int", self._get(_EVENTS))

    def _drain(self) -> None:
        self._scheduled = False
        if self.zmq.closed:
            return
        if not self._events() & _POLLIN:
            return
        self._draining = True
        try:
            self._handle_burst()
            if self._on_drained is not None:
                self._on_drained()
        finally:
            self._draining = False
            if not self.zmq.closed and self._events() & _POLLIN:
                self.poll_soon()

    def _handle_burst(self) -> None:
        """Handle the waiting messages, at most one burst.

        After the first message, poll the socket before the next recv: mostly it is empty, and a recv that finds nothing
        raises, which takes longer than the poll. If there are more messages, read on until recv raises.
        """
        for handled in range(self._limits.burst_messages):
            try:
                first = self._recv(_NOBLOCK)
            except zmq.Again:
                return
            self._on_message(*self._rest(first))
            if self.zmq.closed or (not handled and not self._events() & _POLLIN):
                return

    def _rest(self, first: bytes) -> tuple[list[bytes], list[memoryview], bool]:
        """Return the whole message. All its parts have arrived; those beyond the limits are read and discarded."""
        if self._sender is not None:
            return self._rest_with_sender(first, self._sender)
        head = [first]
        room = self._limits.max_message_bytes
        for _ in range(1, self._num_heads):  # a ROUTER puts the route before at least one part
            head.append(self._recv(_NOBLOCK))
            room -= len(head[-1])
        frames: list[memoryview] = []
        while self._get(_RCVMORE):
            frame = self._recv(_NOBLOCK, copy=False).buffer
            room -= frame.nbytes
            if room >= 0 and len(frames) <= self._limits.max_frames:
                frames.append(frame)
        return head, frames, room < 0 or len(frames) > self._limits.max_frames

    def _rest_with_sender(self, route: bytes, sender: Sender) -> tuple[list[bytes], list[memoryview], bool]:
        """Like ``_rest``, for a ROUTER with a ``sender``, which needs every size."""
        part = self._recv(_NOBLOCK, copy=False)
        sizes = [part.buffer.nbytes]
        room = self._limits.max_message_bytes - sizes[0]
        frames: list[memoryview] = []
        while self._get(_RCVMORE):
            frame = self._recv(_NOBLOCK, copy=False).buffer
            sizes.append(frame.nbytes)
            room -= frame.nbytes
            if room >= 0 and len(frames) <= self._limits.max_frames:
                frames.append(frame)
        head = [route, part.bytes, *sender(part, sizes)]
        return head, frames, room < 0 or len(frames) > self._limits.max_frames
