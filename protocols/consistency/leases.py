"""Who holds which lease, and until when. A holder that is heard renews all its leases at once.

A lease lives until ``lease_ms`` after the later of its grant and the last word of its holder. One queue entry a holder,
looked at again only when it may be due: renewing costs one assignment, a tick costs what expires.
"""

from heapq import heappop, heappush
from itertools import islice, takewhile

from staleflow.protocols.consistency.groups import Group
from staleflow.protocols.consistency.ids import LeaseId, WorkerId


class Holder:
    __slots__ = ("heard_ms", "leases", "queued")

    def __init__(self) -> None:
        self.heard_ms = 0
        self.leases: dict[LeaseId, Group] = {}
        """In the order of their grant."""
        self.queued = False


class Leases:
    """All leases that are still being worked on."""

    __slots__ = ("_due", "_lease_ms", "holders")

    def __init__(self, lease_ms: int) -> None:
        self._lease_ms = lease_ms
        self._due: list[tuple[int, WorkerId]] = []
        self.holders: dict[WorkerId, Holder] = {}

    def grant(self, group: Group, now_ms: int) -> None:
        holder = self.holders.get(group.worker)
        if holder is None:
            holder = self.holders[group.worker] = Holder()
            holder.heard_ms = now_ms
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
            holder.heard_ms = now_ms

    def heard(self, group: Group) -> bool:
        """Whether the holder was heard since it got this lease. Nothing is known of one that has no lease."""
        holder = self.holders.get(group.worker)
        return holder is not None and holder.heard_ms > group.granted_ms

    def leave(self, worker: WorkerId) -> None:
        """Whatever was heard of it, it is gone."""
        holder = self.holders.get(worker)
        if holder is not None:
            holder.heard_ms = -1

    def of(self, worker: WorkerId) -> list[Group]:
        holder = self.holders.get(worker)
        return list(holder.leases.values()) if holder is not None else []

    def expired(self, now_ms: int) -> list[Group]:
        """What is due, oldest lease first. The caller releases all of it."""
        gone: list[Group] = []
        while self._due and self._due[0][0] <= now_ms:
            _, worker = heappop(self._due)
            holder = self.holders[worker]
            late = self._late(holder, now_ms)
            gone += late
            if len(late) < len(holder.leases):
                first = next(islice(holder.leases.values(), len(late), None))
                due_ms = max(holder.heard_ms, first.granted_ms) + self._lease_ms
                heappush(self._due, (due_ms, worker))
            else:
                holder.queued = False
                if not holder.leases:
                    del self.holders[worker]
        gone.sort(key=lambda group: group.lease)
        return gone

    def _late(self, holder: Holder, now_ms: int) -> list[Group]:
        if holder.heard_ms + self._lease_ms > now_ms:
            return []
        return list(takewhile(lambda group: group.granted_ms + self._lease_ms <= now_ms, holder.leases.values()))
