"""Answers that their peers have not taken: how much memory they hold, peer by peer, and when that is too much.

ZeroMQ bounds what it queues for a peer in messages only, and a message may be as large as a chunk of weights. Large
frames are sent without a copy, so each is known to be gone when ZeroMQ lets go of its memory.
"""

from collections import deque
from typing import Protocol


class Tracker(Protocol):
    """Of one frame, as ZeroMQ gives it."""

    @property
    def done(self) -> bool:
        """ZeroMQ has sent the frame, or thrown it away."""
        ...


class Unread:
    """By route, the large frames that are still on their way."""

    def __init__(self, most_of_one: int, most_of_all: int) -> None:
        self._most_of_one = most_of_one
        self._most_of_all = most_of_all
        self._frames: dict[bytes, deque[tuple[Tracker, int]]] = {}
        self._nbytes: dict[bytes, int] = {}

    @property
    def nbytes(self) -> int:
        """Of all peers, as far as it was looked at."""
        return sum(self._nbytes.values())

    def has_room(self, route: bytes, nbytes: int) -> bool:
        """Whether so many bytes more may be sent to a peer. One that has taken everything always gets one answer."""
        self._look(route)
        if not (held := self._nbytes.get(route, 0)):
            return True
        return held + nbytes <= self._most_of_one and self.nbytes + nbytes <= self._most_of_all

    def sent(self, route: bytes, tracker: Tracker, nbytes: int) -> None:
        """A large frame is on its way."""
        if route not in self._frames:
            for other in list(self._frames):  # of connections that are gone: nobody asks for them again
                self._look(other)
            self._frames[route], self._nbytes[route] = deque(), 0
        self._frames[route].append((tracker, nbytes))
        self._nbytes[route] += nbytes

    def _look(self, route: bytes) -> None:
        frames = self._frames.get(route)
        if frames is None:
            return
        while frames and frames[0][0].done:
            self._nbytes[route] -= frames.popleft()[1]
        if not frames:
            del self._frames[route], self._nbytes[route]
