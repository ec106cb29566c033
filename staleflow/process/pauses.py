"""Pauses of this process: SIGSTOP, a paused virtual machine, a sync that blocks the loop.

While a server does not run, it reads no message, so the silence of its peers proves nothing. A server that ends rights
after a time (leases, tickets) adds the length of its own pauses to those times before it ends any. Pure.
"""

from typing import Final

MIN_PAUSE_S: Final = 0.1
"""Shorter delays are the jitter of a busy loop: credited, they would add up and keep the rights of the dead."""


class Pauses:
    """Measures pauses by the lateness of a periodic tick."""

    def __init__(self, interval_s: float) -> None:
        """``interval_s``: expected time between two ticks."""
        self._interval_s = interval_s
        self._last_s: float | None = None

    def tick(self, now_s: float) -> float:
        """Return by how many seconds this tick is late; 0 for the first one and for jitter."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is None:
            return 0.0
        late_s = now_s - last_s - self._interval_s
        return late_s if late_s >= MIN_PAUSE_S else 0.0
