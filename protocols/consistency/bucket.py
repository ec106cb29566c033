"""The live groups of one deadline: counts by state, and the next group in each order.

Lists and heaps delete lazily: an entry whose group has changed state or role is skipped when it is reached, and swept
when stale entries pile up. Every change therefore has constant amortized cost.
"""

from collections.abc import Iterator
from heapq import heappop

from staleflow.protocols.consistency.groups import LEASED, OCCUPIED, PUSHED, Group
from staleflow.protocols.consistency.ids import GroupId


class Bucket:
    """The live groups of one deadline, with the counted ones counted by state."""

    __slots__ = ("idle", "leased", "occupied", "open", "pushed", "queue", "spare_queue", "spares", "truncating")

    def __init__(self) -> None:
        self.leased = 0
        self.pushed = 0
        self.occupied = 0
        """Occupied groups that are not claimed."""
        self.truncating = 0
        """Leased groups for which a ``Truncate`` was emitted."""
        self.open: list[Group] = []
        """Counted groups that are leased or pushed, lease ascending. Stale entries are skipped and swept."""
        self.idle: list[Group] = []
        """Counted groups that are leased, likewise: the candidates for swapping roles with a spare."""
        self.queue: list[tuple[int, Group]] = []
        """Heap of (order of occupation, group) of the counted occupied groups. Stale entries are skipped."""
        self.spare_queue: list[tuple[int, Group]] = []
        self.spares: dict[GroupId, Group] = {}

    @property
    def counted(self) -> int:
        return self.leased + self.pushed + self.occupied

    def unfinished(self) -> Iterator[Group]:
        """Iterate over the counted leased and pushed groups, newest lease first."""
        return (group for group in reversed(self.open) if group.state <= PUSHED and not group.spare)

    def newest_leased(self) -> Group | None:
        while self.idle:
            if self.idle[-1].state is LEASED and not self.idle[-1].spare:
                return self.idle[-1]
            self.idle.pop()
        return None

    def first(self) -> Group | None:
        """Return the unclaimed counted group that was occupied first."""
        while self.queue:
            group = self.queue[0][1]
            if group.state is OCCUPIED and group.claim < 0:
                return group
            heappop(self.queue)
        return None

    def take(self, count: int) -> list[Group]:
        """Remove and return the first ``count`` groups of the queue, longest occupied first.

        The caller adjusts the counters.
        """
        line = [entry for entry in sorted(self.queue) if entry[1].state is OCCUPIED and entry[1].claim < 0]
        self.queue = line[count:]
        return [group for _, group in line[:count]]

    def first_spare(self) -> Group | None:
        while self.spare_queue:
            group = self.spare_queue[0][1]
            if group.state is OCCUPIED and group.spare:
                return group
            heappop(self.spare_queue)
        return None

    def list_open(self, group: Group) -> None:
        """Insert a counted leased or pushed group in lease order, which is nearly always at the end."""
        # Sweep when more than half of the entries are stale, so that the lists stay proportional to the live groups.
        if len(self.open) > 2 * (self.leased + self.pushed) + 64:
            self.open = [other for other in self.open if other.state <= PUSHED and not other.spare]
        _insert(self.open, group)
        if group.state is LEASED:
            if len(self.idle) > 2 * self.leased + 64:
                self.idle = [other for other in self.idle if other.state is LEASED and not other.spare]
            _insert(self.idle, group)


def _insert(line: list[Group], group: Group) -> None:
    out_of_order = line and line[-1].lease > group.lease
    line.append(group)
    if out_of_order:
        line.sort(key=by_lease)


def by_lease(group: Group) -> int:
    return group.lease
