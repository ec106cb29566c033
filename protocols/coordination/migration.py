"""Which groups go on elsewhere, with the tokens that they have.

StaleFlow (2601.12784) re-balances by interrupting trajectories on the instance that is worst off and routing them anew
when an instance starves or the throughput of two differs by more than a threshold; its released code interrupts a whole
instance. Here single groups move: few a cycle, none that moved or began a moment ago, none that has nearly ended, those
that pin the trainer's step first, each to the instance where its samples are written fastest.

A group goes only where its newest version or a newer one is loaded: a sample's versions never fall. And only where it
would be written at once: nothing is crowded out there, and there are slots and KV cache for all of it. So no two
instances exchange groups in a cycle, however much is waiting.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import nlargest, nsmallest
from typing import Literal

from staleflow.protocols.consistency.ids import GroupId, WorkerId
from staleflow.protocols.coordination.view import Flight, Instance, Move, Snapshot

Migration = Literal["none", "idle", "throughput"]

MAX_MOVES = 8
"""Orders of one cycle."""
MAX_ENDS = 16
"""Instances that groups leave, and that they go to, in one cycle: those where it matters most. With a thousand of them
the others wait for the next one."""
MIN_AGE_MS = 5_000
"""Younger leases stay. A move is a new lease, so no group moves twice in that time, and reports have caught up with the
move before."""
FULL_KV = 0.95
"""Share of the KV cache in use above which nothing more begins."""
MIN_GAP = 1.05
"""What is known of equal instances differs by some percent: a smaller gap than this is none."""
MIN_LEFT_S = 2.0
"""A group that is expected to end sooner stays: moving costs reading its tokens in again."""


def none(snapshot: Snapshot, gap: float, given: Collection[WorkerId]) -> list[Move]:
    """Every group ends where it began."""
    return []


def idle(snapshot: Snapshot, gap: float, given: Collection[WorkerId]) -> list[Move]:
    """From instances whose samples wait for a slot to those that have nothing to do."""
    targets = [i for i in _open(snapshot, given) if not (i.held or i.running or i.waiting)]
    return _moves(snapshot, targets, lambda targets: [])


def throughput(snapshot: Snapshot, gap: float, given: Collection[WorkerId]) -> list[Move]:
    """What waits for a slot to whoever has one free, and what is written to where that is ``gap`` times as fast."""

    gap = max(gap, MIN_GAP)

    def slow(targets: Sequence[Instance]) -> list[tuple[Instance, float]]:
        best = max(pace(target, snapshot.group_size) for target in targets)
        paces = ((pace(i), i) for i in snapshot.instances if i.running)
        found = ((here, i) for here, i in paces if 0.0 < here * gap <= best)
        return [(i, here * gap) for here, i in nsmallest(MAX_ENDS, found, key=lambda item: item[0])]

    return _moves(snapshot, _open(snapshot, given), slow)


MIGRATIONS: dict[Migration, Callable[[Snapshot, float, Collection[WorkerId]], list[Move]]] = {
    "none": none,
    "idle": idle,
    "throughput": throughput,
}


def move(snapshot: Snapshot, migration: Migration, gap: float, given: Collection[WorkerId]) -> list[Move]:
    """Who goes on elsewhere now. ``given``: instances that begin new groups in this cycle; nothing moves to them."""
    return MIGRATIONS[migration](snapshot, gap, given)


def _moves(
    snapshot: Snapshot,
    targets: Sequence[Instance],
    slow: Callable[[Sequence[Instance]], Iterable[tuple[Instance, float]]],
) -> list[Move]:
    """Groups that wait go first; then those of ``slow`` instances, to where a sample gets at least so many tokens a
    second: the longest expected remainder first, of those without one the oldest."""
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
    """Samples that wait for others to end. One that waits beside a free slot is about to begin, unless the KV cache is
    full."""
    if not instance.slots or instance.kv_used >= FULL_KV:
        return instance.waiting
    return max(0, min(instance.waiting, instance.running + instance.waiting - instance.slots))


def pace(instance: Instance, more: int = 0, kv_each: float = 0.0) -> float:
    """Tokens a second of one sample that runs, when ``more`` of them do with ``kv_each`` tokens; 0.0: nobody knows.

    By the cost model; without one as measured, and then more samples share what there is.
    """
    samples = instance.running + more
    if not samples:
        return 0.0
    if instance.cost is None:
        return instance.tokens_per_s / samples
    return instance.cost.rate(samples, instance.kv_tokens + more * kv_each) / samples


def _kv_each(instance: Instance) -> float:
    """Tokens in the cache for each sample that runs."""
    return instance.kv_tokens / instance.running if instance.running else 0.0


def _open(snapshot: Snapshot, given: Collection[WorkerId]) -> list[Instance]:
    """Instances that could take a group over: whoever is crowded itself is none."""
    return [
        i
        for i in snapshot.instances
        if i.held < i.capacity and i.usable and not (i.pulling or i.on_hold) and i.worker not in given
        if i.kv_used < FULL_KV and not crowded_out(i)
    ]


class Moves:
    """The moves of one cycle, and what they leave of the targets' room."""

    def __init__(self, snapshot: Snapshot, targets: Sequence[Instance], sources: Sequence[Instance]) -> None:
        self.orders: list[Move] = []
        self._group_size = snapshot.group_size
        self._targets = targets
        self._sources = {i.worker: i for i in sources}
        self._flights: dict[WorkerId, list[Flight]] = {worker: [] for worker in self._sources}
        self._pins = {flight.group for flight in snapshot.pinning}
        self._taken: set[GroupId] = set()
        self._given: Counter[WorkerId] = Counter()
        self._unreported: Counter[WorkerId] = Counter({i.worker: i.coming for i in targets})
        """Groups on their way to a target, or there so shortly that its numbers do not show them."""
        for flight in snapshot.flights:
            if (mine := self._flights.get(flight.worker)) is not None:
                mine.append(flight)
            if flight.age_ms < MIN_AGE_MS:
                self._unreported[flight.worker] += 1

    def waiting(self, crowded: Iterable[Instance]) -> list[Flight]:
        """Groups that wait: at each instance those leased last, since engines serve in order; no more of them than
        wait, those counted that are told to leave already, and never all: one at least is what they wait for."""
        found: list[Flight] = []
        for i in crowded:
            leaving = max(0, i.held - i.coming - len(self._flights[i.worker]))
            groups = max(0, min(-(-crowded_out(i) // self._group_size), i.held - i.coming - 1) - leaving)
            found += self.movable([i.worker], lambda flight, _: -flight.lease)[:groups]
        return sorted(found, key=lambda flight: flight.group not in self._pins)

    def movable(self, sources: Iterable[WorkerId], key: Callable[[Flight, float], float]) -> list[Flight]:
        """Groups at the sources that may move: those that pin first, then by ``key`` of each and its seconds left, the
        oldest of equal ones."""
        found: list[tuple[bool, float, int, Flight]] = []
        for worker in sources:
            here = pace(self._sources[worker])
            for flight in self._flights[worker]:
                if flight.spare or flight.age_ms < MIN_AGE_MS or flight.group in self._taken:
                    continue
                left_s = expected_s(flight, here)
                if not 0.0 < left_s < MIN_LEFT_S:
                    found.append((flight.group not in self._pins, key(flight, left_s), flight.lease, flight))
        found.sort(key=lambda item: item[:3])
        return [flight for *_, flight in found]

    def move(self, flight: Flight, *, at_least: float) -> None:
        """Order it to where its samples are written fastest, unless that is below ``at_least``."""
        target = None if len(self.orders) == MAX_MOVES else self._target(flight, at_least)
        if target is None:
            return
        self._taken.add(flight.group)
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
            there = pace(target, more, kv_each)
            if there >= at_least:
                ranked.append((there, -given, -position))
        return self._targets[-max(ranked)[2]] if ranked else None

    def _has_cache(self, target: Instance, more: int, each: float) -> bool:
        """For so many samples more of so many tokens each; an idle instance takes any group."""
        samples = target.waiting + more
        if not target.kv_capacity or target.running + samples == self._group_size:
            return True
        return target.kv_tokens + samples * each <= FULL_KV * target.kv_capacity


def expected_s(flight: Flight, pace: float) -> float:
    """Seconds that a group is expected to need from now on; 0.0 when unknown, or when it is past all expectation."""
    if not flight.length or not pace:
        return 0.0
    return max(0.0, (flight.length - flight.written) / pace - flight.age_ms / 1000)
