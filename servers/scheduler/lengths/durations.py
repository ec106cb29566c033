"""How long groups take, and so how much longer one is likely to take.

The estimate makes no model of lengths, engines or environments: of the groups that took longer than this one has taken
so far, it took half at most so much more. In memory only.
"""

from collections import deque
from collections.abc import Iterable

from staleflow.protocols.consistency.ids import GroupId

KEPT = 256
"""Groups of late that say how long groups take."""
FEWEST = 3
"""Groups that took longer, for an estimate."""


class Durations:
    """Of one kind of work on groups: what is under way since when, and what the last ones took."""

    def __init__(self) -> None:
        self._since_ms: dict[GroupId, int] = {}
        self._took_ms: deque[int] = deque(maxlen=KEPT)
        self._ended_ms: deque[int] = deque(maxlen=KEPT)

    def begin(self, group: GroupId, now_ms: int) -> None:
        self._since_ms[group] = now_ms

    def end(self, group: GroupId, now_ms: int) -> None:
        """The work is done; nothing if its beginning was not seen."""
        since_ms = self._since_ms.pop(group, None)
        self._ended_ms.append(now_ms)
        if since_ms is not None:
            self._took_ms.append(now_ms - since_ms)

    def forget(self, groups: Iterable[GroupId]) -> None:
        """The work came to nothing, and says nothing about others."""
        for group in groups:
            self._since_ms.pop(group, None)

    def so_far_s(self, group: GroupId, now_ms: int) -> float | None:
        """Seconds since it began; None if that was not seen."""
        since_ms = self._since_ms.get(group)
        return None if since_ms is None else (now_ms - since_ms) / 1000

    def left_s(self, group: GroupId, now_ms: int) -> float | None:
        """Median of what the groups of late that took longer than this one so far took more; None: too few did."""
        so_far_s = self.so_far_s(group, now_ms)
        if so_far_s is None:
            return None
        more = sorted(took_ms - so_far_s * 1000 for took_ms in self._took_ms if took_ms > so_far_s * 1000)
        return None if len(more) < FEWEST else more[len(more) // 2] / 1000

    def until_s(self, count: int) -> float | None:
        """Seconds until ``count`` more are done, at the pace of the last ones; None before there is a pace."""
        ended = self._ended_ms
        if len(ended) < FEWEST or ended[-1] <= ended[0]:
            return None
        return max(count, 0) * (ended[-1] - ended[0]) / (len(ended) - 1) / 1000
