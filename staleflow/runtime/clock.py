"""The two clocks. Everything that decides anything uses the monotonic one; the other is a label for people.

Whoever must also run in simulated time is given a ``Clock`` and asks nobody else.
"""

import time
from typing import Final, Protocol


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


def now_ms() -> int:
    """Monotonic milliseconds of this host; comparable between its processes, never between hosts."""
    return time.monotonic_ns() // 1_000_000


def unix_ns() -> int:
    """Nanoseconds since 1970, as the system clock has it; it may jump."""
    return time.time_ns()
