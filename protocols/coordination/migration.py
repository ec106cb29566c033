"""Migration: groups that continue on another instance, with the tokens they have.

StaleFlow (2601.12784) rebalances when an instance starves or the throughput of two instances differs by more than a
threshold: it interrupts trajectories on the most loaded instance and reroutes them. Its released code interrupts a
whole instance. This module moves single groups: few a cycle, none that moved or started recently, none that is nearly
finished, groups that pin the trainer's step first, each to the instance that decodes its samples fastest.

A target must have the group's newest version or a newer one loaded, because the versions of a sample never decrease. It
must also be able to decode the group at once: no samples crowded out, and slots and KV cache for the whole group. Two
instances therefore never exchange groups in one cycle, however many samples wait.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import nlargest, nsmallest
from typing import Literal

from staleflow.protocols.consistency.ids import GroupId, WorkerId
from staleflow.protocols.coordination.view import Flight, Instance, Move, Snapshot

Migration = Literal["none", "idle", "throughput"]

MAX_MOVES = 8
"""Maximum number of moves in one cycle."""
MAX_ENDS = 16
"""Maximum number of sources, and of targets, in one cycle. The most important ones are chosen; with a thousand
instances the others wait for the next cycle."""
MIN_AGE_MS = 5_000
"""Minimum age of a lease that moves. A move is a new lease, so no group moves twice within this time, and reports have
caught up with the previous move."""
FULL_KV = 0.95
"""Share of the KV cache in use above which an instance starts no more samples."""
MIN_GAP = 1.05
"""Smallest effective gap: estimates of equal instances differ by some percent."""
MIN_LEFT_S = 2.0
"""Minimum expected remaining seconds of a group that moves, because the target must prefill its tokens again."""


def none(snapshot: Snapshot, gap: float, given: Collection[WorkerId]) -> list[Move]:
    """Move nothing."""
    return []


def idle(snapshot: Snapshot, gap: float, given: Collection[WorkerId]) -> list[Move]:
    """Move groups from instances whose samples wait for a slot to idle instances."""
    targets = [i for i in _open(snapshot, given) if not (i.held or i.running or i.waiting)]
    return _moves(snapshot, targets, lambda targets: [])


def throughput(snapshot: Snapshot, gap: float, given: Collection[WorkerId]) -> list[Move]:
    """Move groups that wait for a slot to instances with a free one, and running ones to instances ``gap`` times as
    fast."""
    gap = max(gap, MIN_GAP)

    def slow(targets: Sequence[Instance]) -> list[tuple[Instance, float]]:
        best = max(pace(target, snapshot.group_size) for target in targets)
        paces = ((pace(i), i) for i in snapshot.instances if i.running)
        slower = ((here, i) for here, i in paces if 0.0 < here * gap <= best)
        return [(i, here * gap) for here, i in nsmallest(MAX_ENDS, slower, key=lambda item: item[0])]

    return _moves(snapshot, _open(snapshot, given), slow)


MIGRATIONS: dict[Migration, Callable[[Snapshot, float, Collection[WorkerId]], list[Move]]] = {
    "none": none,
    "idle": idle,
    "throughput": throughput,
}


def move(snapshot: Snapshot, migration: Migration, gap: float, given: Collection[WorkerId]) -> list[Move]:
    """Return the moves of this cycle. ``given``: instances that start new groups now; nothing moves to them."""
    return MIGRATIONS[migration](snapshot, gap, given)


def place_for(free: Mapping[WorkerId, int]) -> WorkerId | None:
    """Return the instance that takes over a group that its own instance gives up unasked; None without any.

    ``free``: free places of each instance that can continue the group. The one with most free places takes it, even if
    it has none now: then the group waits for its next one.
    """
    return max(free, key=free.__getitem__, default=None)


def _moves(
    snapshot: Snapshot,
    targets: Sequence[Instance],
    slow: Callable[[Sequence[Instance]], Iterable[tuple[Instance, float]]],
) -> list[Move]:
    """Move waiting groups first, then groups of the ``slow`` instances.

    ``slow`` returns instances, each with the tokens a second of one sample that a target must at least offer. Their
    groups move in order of the longest expected remainder; groups without one in order of age.
    """
    if not targets or not snapshot.flights:
        return []
    targets = nlargest(MAX_ENDS, targets, key=lambda target: pace(target, snapshot.group_size))
    crowded = nlargest(MAX_ENDS, (i for i in snapshot.instances if crowded_out(i)), key=crowded_out)
    slower = list(slow(targets))
    moves = Moves(snapshot, targets, [*crowded, *(i for i, _ in slower)])
    for flight in moves.waiting(crowded):
        moves.move(flight, at_least=0.0)
    at_least = {i.worker: rate for i, rate in slower}
    for flight in moves.movable(at_least, lambda _, left_s: -left_s):
        moves.move(flight, at_least=at_least[flight.worker])
    return moves.orders


def crowded_out(instance: Instance) -> int:
    """Return the number of samples that wait for others to end.

    A sample that waits beside a free slot is about to start, unless the KV cache is full.
    """
    if not instance.slots or instance.kv_used >= FULL_KV:
        return instance.waiting
    return max(0, min(instance.waiting, instance.running + instance.waiting - instance.slots))


def pace(instance: Instance, more: int = 0, kv_each: float = 0.0) -> float:
    """Return the tokens a second of one running sample, if ``more`` samples of ``kv_each`` tokens run too.

    The estimate comes from the cost model; without one, from the measured rate, which more samples would share. 0.0
    means unknown.
    """
    samples = instance.running + more
    if not samples:
        return 0.0
    if instance.cost is None:
        return instance.tokens_per_s / samples
    return instance.cost.rate(samples, instance.kv_tokens + more * kv_each) / samples


def _kv_each(instance: Instance) -> float:
    """Return the tokens in the cache for each running sample."""
    return instance.kv_tokens / instance.running if instance.running else 0.0


def _open(snapshot: Snapshot, given: Collection[WorkerId]) -> list[Instance]:
    """Return the instances that could take over a group; a crowded instance could not."""
    return [
        i
        for i in snapshot.instances
        if i.held < i.capacity and i.usable and not (i.pulling or i.on_hold) and i.worker not in given
        if i.kv_used < FULL_KV and not crowded_out(i)
    ]


class Moves:
    """The moves of one cycle, and the room that they leave at the targets."""

    def __init__(self, snapshot: Snapshot, targets: Sequence[Instance], sources: Sequence[Instance]) -> None:
        self.orders: list[Move] = []
        self._group_size = snapshot.group_size
        self._targets = targets
        self._sources = {i.worker: i for i in sources}
        self._flights: dict[WorkerId, list[Flight]] = {worker: [] for worker in self._sources}
        self._pins = {flight.group for flight in snapshot.pinning}
        self._moved: set[GroupId] = set()
        self._given: Counter[WorkerId] = Counter()
        self._unreported: Counter[WorkerId] = Counter({i.worker: i.coming for i in targets})
        """Groups that move to a target, or arrived so recently that its reports do not include them."""
        for flight in snapshot.flights:
            if (mine := self._flights.get(flight.worker)) is not None:
                mine.append(flight)
            if flight.age_ms < MIN_AGE_MS:
                self._unreported[flight.worker] += 1

    def waiting(self, crowded: Iterable[Instance]) -> list[Flight]:
        """Return the groups that wait at the crowded instances, pinning groups first.

        At each instance these are the newest leases, because engines serve in order. Their number is limited to the
        groups that wait, less those already ordered to leave. At least one group stays: the others wait for it.
        """
        waiting: list[Flight] = []
        for i in crowded:
            leaving = max(0, i.held - i.coming - len(self._flights[i.worker]))
            groups = max(0, min(-(-crowded_out(i) // self._group_size), i.held - i.coming - 1) - leaving)
            waiting += self.movable([i.worker], lambda flight, _: -flight.lease)[:groups]
        return sorted(waiting, key=lambda flight: flight.group not in self._pins)

    def movable(self, sources: Iterable[WorkerId], key: Callable[[Flight, float], float]) -> list[Flight]:
        """Return the groups at the sources that may move.

        Pinning groups come first, then the order is by ``key`` of the group and its remaining seconds, then by age.
        """
        ranked: list[tuple[bool, float, int, Flight]] = []
        for worker in sources:
            here = pace(self._sources[worker])
            for flight in self._flights[worker]:
                if flight.spare or flight.age_ms < MIN_AGE_MS or flight.group in self._moved:
                    continue
                left_s = expected_s(flight, here)
                if not 0.0 < left_s < MIN_LEFT_S:
                    ranked.append((flight.group not in self._pins, key(flight, left_s), flight.lease, flight))
        ranked.sort(key=lambda item: item[:3])
        return [flight for *_, flight in ranked]

    def move(self, flight: Flight, *, at_least: float) -> None:
        """Order a move to the target that decodes the samples fastest, unless that is slower than ``at_least``."""
        target = None if len(self.orders) == MAX_MOVES else self._target(flight, at_least)
        if target is None:
            return
        self._moved.add(flight.group)
        self._given[target.worker] += 1
        self._unreported[target.worker] += 1
        written = flight.written + pace(self._sources[flight.worker]) * flight.age_ms / 1000
        self.orders.append(
            Move(group=flight.group, lease=flight.lease, worker=flight.worker, to=target.worker, written=written)
        )

    def _target(self, flight: Flight, at_least: float) -> Instance | None:
        source = self._sources[flight.worker]
        kv_each = _kv_each(source)
        ranked: list[tuple[float, int, int]] = []
        for position, target in enumerate(self._targets):
            given = self._given[target.worker]
            older = (target.lineage, target.version) < (source.lineage, source.version)
            more = self._group_size * (self._unreported[target.worker] + 1)
            full = given >= target.free or 0 < target.slots < target.running + target.waiting + more
            if target is source or older or full or not self._has_cache(target, more, max(flight.length, kv_each)):
                continue
            rate = pace(target, more, kv_each)
            if rate >= at_least:
                ranked.append((rate, -given, -position))
        return self._targets[-max(ranked)[2]] if ranked else None

    def _has_cache(self, target: Instance, more: int, each: float) -> bool:
        """Return True if the cache has room for ``more`` samples of ``each`` tokens.

        An idle instance takes any group.
        """
        samples = target.waiting + more
        if not target.kv_capacity or target.running + samples == self._group_size:
            return True
        return target.kv_tokens + samples * each <= FULL_KV * target.kv_capacity


def expected_s(flight: Flight, pace: float) -> float:
    """Return the expected remaining seconds of a group; 0.0 if unknown or if the expectation is already exceeded."""
    if not flight.length or not pace:
        return 0.0
    return max(0.0, (flight.length - flight.written) / pace - flight.age_ms / 1000)
