"""Tokens a second over the last few seconds, from a count that only grows."""

import time
from collections import deque

WINDOW_S = 5.0


class Throughput:
    """Fed with the count whenever it has grown."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def record(self, tokens: int) -> None:
        """``tokens``: how many there have been in all."""
        now = time.monotonic()
        if now - self._seen[-1][0] > WINDOW_S / 20:
            self._seen.append((now, tokens))
            while len(self._seen) > 2 and now - self._seen[1][0] > WINDOW_S:
                self._seen.popleft()

    def per_s(self, tokens: int) -> float:
        """``tokens``: how many there have been in all by now."""
        (then, before), now = self._seen[0], time.monotonic()
        return (tokens - before) / (now - then) if now - then > 0.1 else 0.0
