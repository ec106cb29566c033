"""Leases by holder, with their expiry. A renewal extends all leases of its holder at once.

A lease expires ``lease_ms`` after the later of its grant and the last renewal of its holder. Each holder has one queue
entry, which is examined only once it may be due: a renewal costs one assignment, a tick costs only the expired leases.
"""

from heapq import heappop, heappush
from itertools import islice, takewhile

from staleflow.protocols.consistency.groups import Group
from staleflow.protocols.consistency.ids import LeaseId, WorkerId


class Holder:
    """The leases of one worker and the time of its last renewal."""

    __slots__ = ("leases", "queued", "renewed_ms")

    def __init__(self) -> None:
        self.renewed_ms = 0
        self.leases: dict[LeaseId, Group] = {}
        """Leased groups by lease, in the order of their grant."""
        self.queued = False


class Leases:
    """All leases of groups that are not pushed yet."""

    __slots__ = ("_due", "_lease_ms", "holders")

    def __init__(self, lease_ms: int) -> None:
        self._lease_ms = lease_ms
        self._due: list[tuple[int, WorkerId]] = []
        self.holders: dict[WorkerId, Holder] = {}

    def grant(self, group: Group, now_ms: int) -> None:
        holder = self.holders.get(group.worker)
        if holder is None:
            holder = self.holders[group.worker] = Holder()
            holder.renewed_ms = now_ms
        group.granted_ms = now_ms
        holder.leases[group.lease] = group
        if not holder.queued:
            holder.queued = True
            heappush(self._due, (now_ms + self._lease_ms, group.worker))

    def end(self, group: Group) -> None:
        holder = self.holders[group.worker]
        del holder.leases[group.lease]
        if not holder.leases and not holder.queued:
            del self.holders[group.worker]

    def renew(self, worker: WorkerId, now_ms: int) -> None:
        holder = self.holders.get(worker)
        if holder is not None:
            holder.renewed_ms = now_ms

    def renewed_since_grant(self, group: Group) -> bool:
        """Return True if the holder has renewed since it got this lease; False for a worker without leases."""
        holder = self.holders.get(group.worker)
        return holder is not None and holder.renewed_ms > group.granted_ms

    def forget_renewals(self, worker: WorkerId) -> None:
        """Discard the renewals of a worker that detached, so that they extend no later lease."""
        holder = self.holders.get(worker)
        if holder is not None:
            holder.renewed_ms = -1

    def of(self, worker: WorkerId) -> list[Group]:
        holder = self.holders.get(worker)
        return list(holder.leases.values()) if holder is not None else []

    def expired(self, now_ms: int) -> list[Group]:
        """Return the groups whose lease has expired, oldest lease first. The caller must release all of them."""
        overdue: list[Group] = []
        while self._due and self._due[0][0] <= now_ms:
            _, worker = heappop(self._due)
            holder = self.holders[worker]
            late = self._late(holder, now_ms)
            overdue += late
            if len(late) < len(holder.leases):
                # Grants are in time order, so the first lease that has not expired is the next one due.
                first = next(islice(holder.leases.values(), len(late), None))
                due_ms = max(holder.renewed_ms, first.granted_ms) + self._lease_ms
                heappush(self._due, (due_ms, worker))
            else:
                holder.queued = False
                if not holder.leases:
                    del self.holders[worker]
        overdue.sort(key=lambda group: group.lease)
        return overdue

    def _late(self, holder: Holder, now_ms: int) -> list[Group]:
        if holder.renewed_ms + self._lease_ms > now_ms:
            return []
        return list(takewhile(lambda group: group.granted_ms + self._lease_ms <= now_ms, holder.leases.values()))
