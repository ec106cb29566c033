"""Delays between retries: exponential, capped, jittered."""

import random

_MAX_DOUBLINGS = 64
"""More would overflow a float; the cap applies long before."""


class Backoff:
    """Random delays from ``base_s`` to twice it, then to four times it, ... never above ``cap_s``.

    The lower bound stays ``base_s``, so that no retry comes sooner than the server asked for.
    """

    def __init__(self, base_s: float, cap_s: float) -> None:
        self._base_s = base_s
        self._cap_s = max(cap_s, base_s)

    def delay_s(self, attempt: int) -> float:
        """Return the seconds to wait after attempt number ``attempt``, from 1."""
        high_s = min(self._base_s * 2.0 ** min(attempt, _MAX_DOUBLINGS), self._cap_s)
        return random.uniform(self._base_s, high_s)
