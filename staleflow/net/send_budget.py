"""Memory budget of sent replies that their peers have not read yet.

ZeroMQ bounds the queue of a peer in messages only, and a message may be as large as a chunk of weights. Large frames
are sent without a copy, so the end of a frame is known from ZeroMQ's release of its memory.
"""

from collections import deque
from typing import Protocol


class Tracker(Protocol):
    """ZeroMQ's message tracker of one frame."""

    @property
    def done(self) -> bool:
        """True once ZeroMQ has sent or discarded the frame."""
        ...


class SendBudget:
    """Large frames in flight, by route."""

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
