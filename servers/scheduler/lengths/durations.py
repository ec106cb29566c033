"""Durations of work on groups, and estimates of the remaining time.

The estimate needs no model of lengths, engines or environments. It is the median remaining time of the recent groups
that took longer than this group has taken so far. Kept in memory only.
"""

from collections import deque
from collections.abc import Iterable

from staleflow.protocols.consistency.ids import GroupId

MAX_RECENT = 256
"""Number of recent groups that estimates are based on."""
MIN_LONGER = 3
"""Minimum number of longer groups for an estimate."""


class Durations:
    """Start times of groups in progress, and recent durations, for one kind of work on groups."""

    def __init__(self) -> None:
        self._since_ms: dict[GroupId, int] = {}
        self._took_ms: deque[int] = deque(maxlen=MAX_RECENT)
        self._ended_ms: deque[int] = deque(maxlen=MAX_RECENT)

    def begin(self, group: GroupId, now_ms: int) -> None:
        self._since_ms[group] = now_ms

    def end(self, group: GroupId, now_ms: int) -> None:
        """Record the end of the work; without a known start, it counts only for the pace."""
        since_ms = self._since_ms.pop(group, None)
        self._ended_ms.append(now_ms)
        if since_ms is not None:
            self._took_ms.append(now_ms - since_ms)

    def forget(self, groups: Iterable[GroupId]) -> None:
        """Discard groups whose work was aborted: their durations do not enter estimates."""
        for group in groups:
            self._since_ms.pop(group, None)

    def so_far_s(self, group: GroupId, now_ms: int) -> float | None:
        """Return the seconds since the work started; None if the start is unknown."""
        since_ms = self._since_ms.get(group)
        return None if since_ms is None else (now_ms - since_ms) / 1000

    def left_s(self, group: GroupId, now_ms: int) -> float | None:
        """Return the median further seconds of recent groups that took longer than this one; None if too few did."""
        so_far_s = self.so_far_s(group, now_ms)
        if so_far_s is None:
            return None
        more = sorted(took_ms - so_far_s * 1000 for took_ms in self._took_ms if took_ms > so_far_s * 1000)
        return None if len(more) < MIN_LONGER else more[len(more) // 2] / 1000

    def until_s(self, count: int) -> float | None:
        """Return the seconds until ``count`` more groups are done at the recent pace; None if the pace is unknown."""
        ended = self._ended_ms
        if len(ended) < MIN_LONGER or ended[-1] <= ended[0]:
            return None
        return max(count, 0) * (ended[-1] - ended[0]) / (len(ended) - 1) / 1000
