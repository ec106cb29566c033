"""The two clocks. Everything that decides anything uses the monotonic one; the other is a label for people.

Whoever must also run in simulated time is given a ``Clock`` and asks nobody else.
"""

import time
from typing import Final, Protocol

from staleflow.process.pauses import Pauses

MAX_GAP_S: Final = 0.5
"""Longest time between two reads of a ``RunningClock`` that counts whole. The scheduler reads its clock 20 times a
second and with every message; a commit on a slow disk takes some tenths of a second and must not stop the clock."""


class Clock(Protocol):
    """Where time comes from: this machine, or a simulation."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        ...

    def now_ms(self) -> int:
        """Monotonic milliseconds."""
        ...

    def unix_ns(self) -> int:
        """Nanoseconds since 1970."""
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

    A peer's silence counts in this time only, because its messages wait unread while this process stands still. Of a
    longer gap between two reads ``MAX_GAP_S`` counts, so that a tick must read it several times a second. Every read
    takes note of pauses, not only the tick: after a pause messages are handled before the tick is due.
    """

    def __init__(self, real: Clock) -> None:
        self._real = real
        self._pauses = Pauses(MAX_GAP_S)
        self._paused_ns = 0

    @property
    def paused_s(self) -> float:
        """Time left out so far."""
        return self._paused_ns / 1e9

    def now_ns(self) -> int:
        """Nanoseconds of running time; they never go back and mean nothing to other processes."""
        real_ns = self._real.now_ns()
        self._paused_ns += round(self._pauses.tick(real_ns / 1e9) * 1e9)
        return real_ns - self._paused_ns

    def now_ms(self) -> int:
        return self.now_ns() // 1_000_000

    def unix_ns(self) -> int:
        return self._real.unix_ns()


def now_ms() -> int:
    """Monotonic milliseconds of this host; comparable between its processes, never between hosts."""
    return time.monotonic_ns() // 1_000_000


def unix_ns() -> int:
    """Nanoseconds since 1970, as the system clock has it; it may jump."""
    return time.time_ns()
