"""The two clocks. Everything that decides anything uses the monotonic one; the other is a label for people."""

import time


def now_ms() -> int:
    """Monotonic milliseconds of this host; comparable between its processes, never between hosts."""
    return time.monotonic_ns() // 1_000_000


def unix_ns() -> int:
    """Nanoseconds since 1970, as the system clock has it; it may jump."""
    return time.time_ns()
