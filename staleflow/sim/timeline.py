"""Virtual time: what happens next, in order of time, and in order of asking where times are equal."""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

Happening = Callable[[], object]

_BEGIN_NS = 1_000_000_000_000
"""Monotonic time at second 0: servers take 0 for "never"."""


class Timeline:
    """A ``Clock`` that stands still until everything of an instant has happened."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._later: list[tuple[float, int, Happening]] = []
        self._soon: deque[Happening] = deque()
        self._order = 0

    def now_ns(self) -> int:
        return _BEGIN_NS + round(self.now_s * 1e9)

    def now_ms(self) -> int:
        return self.now_ns() // 1_000_000

    def unix_ns(self) -> int:
        return self.now_ns()

    def soon(self, happening: Happening) -> None:
        """At this instant, after what is already to happen at it."""
        self._soon.append(happening)

    def at(self, time_s: float, happening: Happening) -> None:
        """At ``time_s``, or at this instant when that is over."""
        self._order += 1
        heappush(self._later, (max(time_s, self.now_s), self._order, happening))

    def after(self, delay_s: float, happening: Happening) -> None:
        """``delay_s`` seconds from now."""
        self.at(self.now_s + delay_s, happening)

    def run(self, until: Callable[[], bool], settle: Callable[[], bool] = lambda: False) -> bool:
        """Let things happen until ``until()``; False when nothing is left to happen before that.

        Before time goes on ``settle()`` is called, again and again while it says that something came of it.
        """
        soon, later = self._soon, self._later
        while not until():
            if soon:
                soon.popleft()()
            elif later and later[0][0] <= self.now_s:
                heappop(later)[2]()
            elif settle():
                continue
            elif later:
                self.now_s, _, happening = heappop(later)
                happening()
            else:
                return False
        return True
