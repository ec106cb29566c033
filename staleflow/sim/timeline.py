"""Virtual time: run events in order of time, and in order of scheduling where times are equal."""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

_BEGIN_NS = 1_000_000_000_000
"""Monotonic time at second 0; not 0, because servers use 0 for "never"."""


class Timeline:
    """A ``Clock`` that advances only after all events of an instant have run."""

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

    def soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Schedule at this instant, after the events already scheduled for it."""
        self._soon.append((callback, args))

    def at(self, time_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Schedule at ``time_s``, or at this instant if that has passed."""
        self._order += 1  # breaks ties, so that equal times run in order of scheduling in every run
        heappush(self._later, (time_s if time_s > self.now_s else self.now_s, self._order, callback, args))

    def after(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Schedule ``delay_s`` seconds from now."""
        self.at(self.now_s + delay_s, callback, *args)

    def run(self, until: Callable[[], bool], settle: Callable[[], bool] = lambda: False) -> bool:
        """Run events until ``until()``; return False if no event is left before that.

        ``until`` is called when no event of ``soon`` is left. Before time advances ``settle()`` is called repeatedly
        while it returns True, which means that it did something.
        """
        soon, later = self._soon, self._later
        while True:
            while soon:
                callback, args = soon.popleft()
                callback(*args)
            if until():
                return True
            elif later and later[0][0] <= self.now_s:
                _, _, callback, args = heappop(later)
                callback(*args)
            elif settle():
                continue
            elif later:
                self.now_s, _, callback, args = heappop(later)
                callback(*args)
            else:
                return False
        return True
