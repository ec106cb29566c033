"""Admission and batch formation under the staleness bound.

A group of version v may be consumed by steps v .. v + max_staleness. Jobs with deadlines, one batch a step: Hall's
condition says who may start, earliest-deadline-first says who trains next. Counters per deadline, nothing per entry.
Under the token bound nothing has a deadline: one bucket, a volume, and first occupied first trained.

Rules of this file: no clock, no randomness, no IO, no log. It is the only place that knows ``s`` and ``v``.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from staleflow.protocols.consistency.bucket import Bucket, by_lease
from staleflow.protocols.consistency.groups import LEASED, OCCUPIED, PUSHED, Group
from staleflow.protocols.consistency.ids import Step, Version
from staleflow.protocols.consistency.limits import Bound, Limits


class Window:
    """The steps that may still be filled, and what fills them."""

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
        """Counted live groups but the claimed ones."""
        self.occupied = 0
        self.claimed = 0
        self.num_spares = 0
        self.spares_occupied = 0

    @property
    def ahead(self) -> int:
        """Steps sealed and not consumed; 0: the trainer waits."""
        return self.step - self.version

    # --- rules ---------------------------------------------------------------------------------------------------

    def deadline(self, version: int) -> int:
        return 0 if self.token_bound else version + self.max_staleness

    def deadlines(self) -> range:
        """Every deadline that a live group can have, ascending."""
        return range(1) if self.token_bound else range(self.step, self.version + self.max_staleness + 1)

    def slack(self, deadline: int) -> int:
        """How many more groups of ``deadline`` may be counted: for every d >= deadline, N(d) + 1 <= B(d - s + 1)."""
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
        """How many more spares of ``deadline`` may be leased."""
        if self.overfull() or (deadline < self.step and not self.token_bound):
            return 0
        return max(0, self.max_spares - self.num_spares)

    def overfull(self) -> bool:
        """Token bound: a rollback or quarantine returned more than the volume; nothing is leased until that is used."""
        return self.token_bound and self.counted + self.claimed > self._volume()

    def _volume(self) -> int:
        return self.batch_size * (self.version + self.max_staleness - self.step + 1)

    def may_claim(self, deadline: int) -> bool:
        """Taking one of ``deadline`` now leaves N(d) <= B(d - s + 1) - c for every d, c counting it."""
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
        """True when B are occupied and what remains without them keeps Hall's condition at s + 1."""
        seats = self.batch_size - self.claimed
        if self.occupied < seats:
            return False
        return self.token_bound or all(excess <= 0 for _, excess in self._excess(seats))

    def _excess(self, seats: int) -> Iterator[tuple[int, int]]:
        """For each deadline, by how much what remains after the batch passes B(d - s)."""
        total = occupied = room = 0
        for d in range(self.step, self.version + self.max_staleness + 1):
            bucket = self.buckets.get(d)
            if bucket is not None:
                total += bucket.counted
                occupied += bucket.occupied
            yield d, total - min(occupied, seats) - room
            room += self.batch_size

    def pinning(self) -> list[tuple[Bucket, int]]:
        """How many unfinished groups of which bucket pin step s, earliest deadline first. Empty when it is starved."""
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
        """The next counted group in EDF order that is not claimed."""
        for d in self.deadlines():
            bucket = self.buckets.get(d)
            if bucket is not None and bucket.occupied:
                return bucket.first()
        return None

    # --- bookkeeping ---------------------------------------------------------------------------------------------

    def enter(self, group: Group) -> None:
        """Take in a live group as what it is: leased, pushed, occupied or claimed; counted or spare."""
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
        """Let go of a group; called before its state, role or claim changes."""
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
        """A leased group is pushed now; called before its state changes."""
        if not group.spare:
            bucket = self.buckets[group.deadline]
            bucket.leased -= 1
            bucket.pushed += 1
            bucket.told -= group.told

    def _count(self, bucket: Bucket, group: Group, by: int) -> None:
        self.counted += by
        if group.state is LEASED:
            bucket.leased += by
            bucket.told += by * group.told
        elif group.state is PUSHED:
            bucket.pushed += by
        else:
            bucket.occupied += by
            self.occupied += by

    def take_earliest(self, count: int) -> list[Group]:
        """Let go of the first ``count`` counted groups in EDF order that are not claimed."""
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
        """Let go of the group that ``first`` named."""
        heappop(self.buckets[group.deadline].queue)
        self.leave(group)

    def late(self) -> list[Group]:
        """Spares that only step s could have trained, oldest lease first."""
        bucket = None if self.token_bound else self.buckets.get(self.step)
        return sorted(bucket.spares.values(), key=by_lease) if bucket is not None else []

    def rise(self) -> None:
        """Step s is sealed and nothing is left that only it could have trained: s + 1 is next."""
        if not self.token_bound:
            self.buckets.pop(self.step, None)
        self.step = Step(self.step + 1)
