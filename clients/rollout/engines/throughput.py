"""Tokens per second over the last few seconds, computed from a cumulative count."""

import time
from collections import deque

WINDOW_S = 5.0


class Throughput:
    """Record the count whenever it grows, and read the rate at any time."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def record(self, tokens: int) -> None:
        """Record ``tokens``, the cumulative count."""
        now = time.monotonic()
        if now - self._samples[-1][0] > WINDOW_S / 20:
            self._samples.append((now, tokens))
            while len(self._samples) > 2 and now - self._samples[1][0] > WINDOW_S:
                self._samples.popleft()

    def per_s(self, tokens: int) -> float:
        """Return the rate up to now. ``tokens`` is the current cumulative count."""
        (then, before), now = self._samples[0], time.monotonic()
        return (tokens - before) / (now - then) if now - then > 0.1 else 0.0
