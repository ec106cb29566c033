"""Admission and batch formation under the staleness bound.

A group of version v may be consumed by steps v .. v + max_staleness. Groups are unit jobs with deadlines and each step
takes one batch, so Hall's condition decides admission and earliest-deadline-first (EDF) forms the next batch. The
window keeps counters per deadline. Under the token bound groups have no deadline: there is one bucket with a volume,
and groups are trained in the order of their occupation.

No clock, randomness, IO or log in this module. Only this module maintains ``s`` and ``v``.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from staleflow.protocols.consistency.bucket import Bucket, by_lease
from staleflow.protocols.consistency.groups import LEASED, OCCUPIED, PUSHED, Group
from staleflow.protocols.consistency.ids import Step, Version
from staleflow.protocols.consistency.limits import Bound, Limits


class Window:
    """The steps that may still be filled, and the live groups that fill them."""

    __slots__ = (
        "batch_size",
        "buckets",
        "claimed",
        "counted",
        "max_spares",
        "max_staleness",
        "num_spares",
        "occupied",
        "spares_occupied",
        "step",
        "token_bound",
        "version",
    )

    def __init__(self, limits: Limits) -> None:
        self.batch_size = limits.batch_size
        self.max_staleness = limits.max_staleness
        self.max_spares = limits.max_spares
        self.token_bound = limits.bound is Bound.TOKEN
        self.step = Step(0)
        """s: the next step to seal."""
        self.version = Version(-1)
        """v: the newest published version."""
        self.clear()

    def clear(self) -> None:
        self.buckets: dict[int, Bucket] = {}
        self.counted = 0
        """Number of counted live groups that are not claimed."""
        self.occupied = 0
        self.claimed = 0
        self.num_spares = 0
        self.spares_occupied = 0

    @property
    def ahead(self) -> int:
        """Number of steps that are sealed and not consumed; 0 means that the trainer waits."""
        return self.step - self.version

    # --- rules ---------------------------------------------------------------------------------------------------

    def deadline(self, version: int) -> int:
        return 0 if self.token_bound else version + self.max_staleness

    def deadlines(self) -> range:
        """Return every deadline that a live group can have, ascending."""
        return range(1) if self.token_bound else range(self.step, self.version + self.max_staleness + 1)

    def rows(self) -> tuple[tuple[Step, int, int, int], ...]:
        """Return rows (deadline, leased, pushed, occupied) of the counted groups."""
        rows = ((d, self.buckets.get(d)) for d in self.deadlines())
        return tuple((Step(d), b.leased, b.pushed, b.occupied) if b else (Step(d), 0, 0, 0) for d, b in rows)

    def slack(self, deadline: int) -> int:
        """Return how many more groups of ``deadline`` may be counted.

        One more fits if N(d) + 1 <= B(d - s + 1) for every d >= deadline, where N(d) groups are due by d.
        """
        if self.token_bound:
            return max(0, self._volume() - self.counted - self.claimed)
        if deadline < self.step:
            return 0
        total, room, least = self.claimed, 0, self.batch_size * (self.max_staleness + 3)
        for d in range(self.step, self.version + self.max_staleness + 1):
            room += self.batch_size
            bucket = self.buckets.get(d)
            if bucket is not None:
                total += bucket.leased + bucket.pushed + bucket.occupied
            if d >= deadline and room - total < least:
                least = room - total
        return least if least > 0 else 0

    def spare_slack(self, deadline: int) -> int:
        """Return how many more spares of ``deadline`` may be leased."""
        if self.overfull() or (deadline < self.step and not self.token_bound):
            return 0
        return max(0, self.max_spares - self.num_spares)

    def overfull(self) -> bool:
        """Return True if a rollback or quarantine returned more groups than the volume (token bound).

        Nothing is leased until the excess is consumed.
        """
        return self.token_bound and self.counted + self.claimed > self._volume()

    def _volume(self) -> int:
        return self.batch_size * (self.version + self.max_staleness - self.step + 1)

    def may_claim(self, deadline: int) -> bool:
        """Return True if claiming a group of ``deadline`` keeps N(d) <= B(d - s + 1) - c for every d.

        c is the number of claims, including the new one.
        """
        if self.token_bound:
            return True
        total, room = self.claimed, 0
        for d in range(self.step, deadline):
            room += self.batch_size
            bucket = self.buckets.get(d)
            if bucket is not None:
                total += bucket.counted
            if total + 1 > room:
                return False
        return True

    def ready(self) -> bool:
        """Return True if B groups are occupied and the rest, without them, meets Hall's condition at s + 1."""
        seats = self.batch_size - self.claimed
        if self.occupied < seats:
            return False
        return self.token_bound or all(excess <= 0 for _, excess in self._excess(seats))

    def _excess(self, seats: int) -> Iterator[tuple[int, int]]:
        """Yield each deadline d and the excess of the groups due by d, after the batch is taken, over B(d - s)."""
        total = occupied = room = 0
        for d in range(self.step, self.version + self.max_staleness + 1):
            bucket = self.buckets.get(d)
            if bucket is not None:
                total += bucket.counted
                occupied += bucket.occupied
            yield d, total - min(occupied, seats) - room
            room += self.batch_size

    def pinning(self) -> list[tuple[Bucket, int]]:
        """Return (bucket, number of its unfinished groups that pin step s), earliest deadline first.

        Empty if step s is starved.
        """
        seats = self.batch_size - self.claimed
        if self.token_bound or self.occupied < seats:
            return []
        chosen = 0
        taken: dict[int, int] = {}
        for d, excess in self._excess(seats):
            for earlier in range(self.step, d + 1):
                bucket = self.buckets.get(earlier)
                if excess <= chosen:
                    break
                if bucket is not None:
                    free = bucket.leased + bucket.pushed - taken.get(earlier, 0)
                    count = min(free, excess - chosen)
                    taken[earlier] = taken.get(earlier, 0) + count
                    chosen += count
        return [(self.buckets[d], count) for d, count in taken.items() if count]

    def first(self) -> Group | None:
        """Return the next unclaimed counted group in EDF order."""
        for d in self.deadlines():
            bucket = self.buckets.get(d)
            if bucket is not None and bucket.occupied:
                return bucket.first()
        return None

    # --- bookkeeping ---------------------------------------------------------------------------------------------

    def enter(self, group: Group) -> None:
        """Add a live group according to its state (leased, pushed, occupied), claim and role (counted or spare)."""
        bucket = self.buckets.get(group.deadline)
        if bucket is None:
            bucket = self.buckets[group.deadline] = Bucket()
        if group.spare:
            bucket.spares[group.id] = group
            self.num_spares += 1
            if group.state is OCCUPIED:
                self.spares_occupied += 1
                heappush(bucket.spare_queue, (group.order, group))
        elif group.claim >= 0:
            self.claimed += 1
        else:
            self._count(bucket, group, 1)
            if group.state is OCCUPIED:
                heappush(bucket.queue, (group.order, group))
            else:
                bucket.list_open(group)

    def leave(self, group: Group) -> None:
        """Remove a group. Call it before the group's state, role or claim changes: they select the counters."""
        bucket = self.buckets[group.deadline]
        if group.spare:
            del bucket.spares[group.id]
            self.num_spares -= 1
            self.spares_occupied -= group.state is OCCUPIED
        elif group.claim >= 0:
            self.claimed -= 1
        else:
            self._count(bucket, group, -1)

    def pushed(self, group: Group) -> None:
        """Count a leased group as pushed. Call it before the group's state changes."""
        if not group.spare:
            bucket = self.buckets[group.deadline]
            bucket.leased -= 1
            bucket.pushed += 1
            bucket.truncating -= group.truncating

    def _count(self, bucket: Bucket, group: Group, by: int) -> None:
        self.counted += by
        if group.state is LEASED:
            bucket.leased += by
            bucket.truncating += by * group.truncating
        elif group.state is PUSHED:
            bucket.pushed += by
        else:
            bucket.occupied += by
            self.occupied += by

    def take_earliest(self, count: int) -> list[Group]:
        """Remove and return the first ``count`` unclaimed counted groups in EDF order."""
        taken: list[Group] = []
        for d in self.deadlines():
            bucket = self.buckets.get(d)
            share = 0 if bucket is None else min(bucket.occupied, count - len(taken))
            if bucket is not None and share:
                taken += bucket.take(share)
                bucket.occupied -= share
        self.occupied -= len(taken)
        self.counted -= len(taken)
        return taken

    def take_first(self, group: Group) -> None:
        """Remove the group that ``first`` returned."""
        heappop(self.buckets[group.deadline].queue)
        self.leave(group)

    def late_spares(self) -> list[Group]:
        """Return the spares that only step s could have trained, oldest lease first."""
        bucket = None if self.token_bound else self.buckets.get(self.step)
        return sorted(bucket.spares.values(), key=by_lease) if bucket is not None else []

    def advance(self) -> None:
        """Make s + 1 the next step, after step s is sealed and no group that is due by s is left."""
        if not self.token_bound:
            self.buckets.pop(self.step, None)
        self.step = Step(self.step + 1)
