"""What happens again and again is logged once a second at most, with how often it happened in between."""

import time
from collections.abc import Callable

INTERVAL_S = 1.0


class Seldom:
    """One kind of message of one process."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._next_s = float("-inf")
        self._left_out = 0

    def due(self) -> str | None:
        """None: this one is left out. Else what to write behind it: nothing, or how many were left out before it."""
        now_s = self._now_s()
        if now_s < self._next_s:
            self._left_out += 1
            return None
        left_out, self._left_out, self._next_s = self._left_out, 0, now_s + INTERVAL_S
        return f" (and {left_out:,} like it before)" if left_out else ""
