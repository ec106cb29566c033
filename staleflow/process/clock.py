"""The two clocks. Every decision uses the monotonic one; wall-clock time is a label for people.

Code that must also run in simulated time takes a ``Clock`` and reads no other clock.
"""

import time
from typing import Final, Protocol

from staleflow.process.pauses import Pauses

MAX_GAP_S: Final = 0.5
"""Longest time between two reads of a ``RunningClock`` that counts in full. The scheduler reads its clock 20 times a
second and with every message; a commit on a slow disk takes some tenths of a second and must not stop the clock."""


class Clock(Protocol):
    """A source of time: this machine, or a simulation."""

    def now_ns(self) -> int:
        """Return monotonic nanoseconds."""
        ...

    def now_ms(self) -> int:
        """Return monotonic milliseconds."""
        ...

    def unix_ns(self) -> int:
        """Return nanoseconds since 1970."""
        ...


class WallClock:
    """The time of this machine."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def unix_ns(self) -> int:
        return time.time_ns()


WALL: Final = WallClock()


class RunningClock:
    """``real`` without the pauses of this process: time in which it could receive messages.

    A peer's silence is measured on this clock, because its messages wait unread while this process is paused. A gap
    between two reads counts up to ``MAX_GAP_S``, so a tick must read the clock several times a second. Every read
    detects pauses, not only the tick: after a pause messages are handled before the tick is due.
    """

    def __init__(self, real: Clock) -> None:
        self._real = real
        self._pauses = Pauses(MAX_GAP_S)
        self._paused_ns = 0

    @property
    def paused_s(self) -> float:
        """Return the seconds left out so far."""
        return self._paused_ns / 1e9

    def now_ns(self) -> int:
        """Return nanoseconds of running time. They never decrease and mean nothing to other processes."""
        real_ns = self._real.now_ns()
        self._paused_ns += round(self._pauses.tick(real_ns / 1e9) * 1e9)
        return real_ns - self._paused_ns

    def now_ms(self) -> int:
        return self.now_ns() // 1_000_000

    def unix_ns(self) -> int:
        return self._real.unix_ns()
