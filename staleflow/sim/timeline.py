"""Virtual time: what happens next, in order of time, and in order of asking where times are equal."""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

_BEGIN_NS = 1_000_000_000_000
"""Monotonic time at second 0: servers take 0 for "never"."""


class Timeline:
    """A ``Clock`` that stands still until everything of an instant has happened."""

    def __init__(self, begin_s: float = 0.0) -> None:
        self.now_s = begin_s
        self._later: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._order = 0

    def now_ns(self) -> int:
        return _BEGIN_NS + round(self.now_s * 1e9)

    def now_ms(self) -> int:
        return self.now_ns() // 1_000_000

    def unix_ns(self) -> int:
        return self.now_ns()

    def soon(self, happening: Callable[..., object], *args: Any) -> None:
        """At this instant, after what is already to happen at it."""
        self._soon.append((happening, args))

    def at(self, time_s: float, happening: Callable[..., object], *args: Any) -> None:
        """At ``time_s``, or at this instant when that is over."""
        self._order += 1
        heappush(self._later, (max(time_s, self.now_s), self._order, happening, args))

    def after(self, delay_s: float, happening: Callable[..., object], *args: Any) -> None:
        """``delay_s`` seconds from now."""
        self.at(self.now_s + delay_s, happening, *args)

    def run(self, until: Callable[[], bool], settle: Callable[[], bool] = lambda: False) -> bool:
        """Let things happen until ``until()``; False when nothing is left to happen before that.

        ``until`` is called when nothing is left to happen soon. Before time advances ``settle()`` is called, again and
        again while it returns True because it did something.
        """
        soon, later = self._soon, self._later
        while True:
            if soon:
                happening, args = soon.popleft()
                happening(*args)
            elif until():
                return True
            elif later and later[0][0] <= self.now_s:
                _, _, happening, args = heappop(later)
                happening(*args)
            elif settle():
                continue
            elif later:
                self.now_s, _, happening, args = heappop(later)
                happening(*args)
            else:
                return False
        return True
