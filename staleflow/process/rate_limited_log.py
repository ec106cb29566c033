"""Limit repeated log messages to one a second, each with the number of suppressed ones before it."""

import time
from collections.abc import Callable

LOG_INTERVAL_S = 1.0


class RateLimitedLog:
    """Rate limit of one kind of message of one process."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._next_s = float("-inf")
        self._suppressed = 0

    def due(self) -> str | None:
        """Return None to suppress this message, else a suffix for it: empty, or the number of suppressed ones before
        it."""
        now_s = self._now_s()
        if now_s < self._next_s:
            self._suppressed += 1
            return None
        suppressed, self._suppressed, self._next_s = self._suppressed, 0, now_s + LOG_INTERVAL_S
        return f" (and {suppressed:,} like it before)" if suppressed else ""
