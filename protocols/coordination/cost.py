"""Routing by the cost model: each group goes where it adds most tokens a second.

StaleFlow (2601.12784, rollout coordination) routes waiting trajectories, oldest version first, each to the engine whose
modelled throughput rises most, provided the rise is at least a share of the rise on an idle engine. StreamRL
(2504.15930, skewness-aware dispatch) adds that long samples need small batches, and that the longest goes first.

In this project trajectories that have a version never wait in the scheduler, so there is a single level: groups to
start. The first pass decides the number of groups of each instance with groups of typical length. The second pass deals
the groups, longest first, each to the instance with the largest gain.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.coordination.candidates import candidates, loads, starts_with
from staleflow.protocols.coordination.view import Cost, Instance, Next, Snapshot, Start

UNKNOWN = Cost(k1=0.0, k2=0.0, k3=1.0, k4=64.0)
"""Placeholder while no instance has a fitted cost: the fewer samples an instance has, the larger its gain. Its unit is
not seconds, so ``min_gain`` is not applied with it."""
LOAD_PENALTY = 0.2
"""Share of the gain that is deducted for an instance with the mean number of samples, relative to an idle one. Fits of
equal engines differ by some percent, which alone must not concentrate groups on one of them."""


def cost_model(snapshot: Snapshot, min_gain: float) -> list[Start]:
    """Start the next groups, longest first, each where throughput rises most.

    An instance gets no group if its throughput would rise by less than ``min_gain`` of the rise on the same instance
    when idle.
    """
    instances = candidates(snapshot)
    if not instances:
        return []
    usual = usual_cost(snapshot.instances)
    fleet = Fleet(snapshot, instances, usual or UNKNOWN)
    given = fleet.fill(min_gain if usual else 0.0)
    ready = [n if not loads(i) else 0 for n, i in zip(given, instances, strict=True)]
    return fleet.deal(snapshot.next[: sum(ready)], ready)


def typical_length(groups: Sequence[Next]) -> float:
    """Return the mean of the expected lengths; 0.0 if none is known."""
    lengths = [item.length for item in groups if item.length > 0]
    return sum(lengths) / len(lengths) if lengths else 0.0


def usual_cost(instances: Sequence[Instance]) -> Cost | None:
    """Return the mean of the fitted costs, for instances without one; None if no instance has a fitted cost."""
    fitted = [i.cost for i in instances if i.cost is not None]
    if not fitted:
        return None
    n = len(fitted)
    return Cost(
        k1=sum(cost.k1 for cost in fitted) / n,
        k2=sum(cost.k2 for cost in fitted) / n,
        k3=sum(cost.k3 for cost in fitted) / n,
        k4=sum(cost.k4 for cost in fitted) / n,
    )


def samples_of(instance: Instance, group_size: int) -> int:
    """Return the number of samples that an instance has, including those it has not reported yet."""
    samples = instance.running + instance.waiting + (instance.ordered + instance.coming) * group_size
    return min(samples, instance.held * group_size)


class Fleet:
    """The candidate instances, with the groups assigned to them in this cycle."""

    def __init__(self, snapshot: Snapshot, instances: list[Instance], usual: Cost) -> None:
        """Start without assigned groups. ``usual`` is the cost of the instances that have no fitted one."""
        self._snapshot = snapshot
        self._instances = instances
        self._group_size = snapshot.group_size
        self._typical = typical_length(snapshot.next)
        self._costs = [i.cost or usual for i in instances]
        samples = [samples_of(i, self._group_size) for i in instances]
        self._mean = (sum(samples) + self._group_size * len(snapshot.next)) / len(instances)
        self._reset(samples)

    def _reset(self, samples: list[int]) -> None:
        # A sample that is not in the cache yet has, over its life, half of its final length in it on average.
        half = self._typical / 2
        self._given = [0] * len(self._instances)
        self._samples = samples
        self._kv = [i.kv_tokens + max(n - i.running, 0) * half for i, n in zip(self._instances, samples, strict=True)]

    def gain(self, position: int) -> float:
        """Return the tokens a second that an instance gains with one more group of typical length."""
        instance, samples, kv = self._instances[position], self._samples[position], self._kv[position]
        after = samples + self._group_size
        before = samples
        if instance.slots and after > instance.slots:
            before, after = min(before, instance.slots), instance.slots
        cost = self._costs[position]
        more = (after - before) * self._typical / 2
        rises = cost.rate(after, kv + more) - cost.rate(before, kv)
        return rises * (1.0 - LOAD_PENALTY * samples / self._mean)

    def _ideal(self, position: int) -> float:
        """Return the gain of the same group if the instance were idle."""
        n = min(self._group_size, self._instances[position].slots or self._group_size)
        return self._costs[position].rate(n, n * self._typical / 2)

    def _has_place(self, position: int) -> bool:
        """Return True if one more group has a place and the cache has room for all of it.

        An idle instance takes any group.
        """
        instance = self._instances[position]
        if self._given[position] >= instance.free:
            return False
        if not instance.kv_capacity or not self._samples[position]:
            return True
        return self._kv[position] + self._group_size * self._typical <= instance.kv_capacity

    def _give(self, position: int, length: float) -> tuple[float, int]:
        """Assign one more group. Return the heap entry with the gain of the next group on this instance."""
        self._given[position] += 1
        self._samples[position] += self._group_size
        self._kv[position] += self._group_size * length / 2
        return -self.gain(position), position

    def fill(self, min_gain: float) -> list[int]:
        """Return the number of groups of typical length that each instance gets."""
        snapshot = self._snapshot
        heap = [(-self.gain(position), position) for position in range(len(self._instances))]
        heapify(heap)
        started = 0
        while heap and started < len(snapshot.next):
            gain, position = heap[0]
            room = snapshot.room[starts_with(self._instances[position], snapshot)]
            enough = not min_gain or -gain >= min_gain * self._ideal(position)
            if started < room and enough and self._has_place(position):
                started += 1
                heapreplace(heap, self._give(position, self._typical))
            else:
                heappop(heap)
        return list(self._given)

    def deal(self, groups: Sequence[Next], shares: Sequence[int]) -> list[Start]:
        """Deal ``groups`` to the instances with a share, longest first, each where the gain is largest."""
        instances = self._instances
        chosen = [position for position, share in enumerate(shares) if share]
        same = len({instances[position].version for position in chosen}) == 1
        for position in chosen:
            self._take_back(position)
        heap = [(-self.gain(position), position) for position in chosen]
        heapify(heap)
        dealt: dict[int, list[GroupId]] = {position: [] for position in chosen}
        for item in sorted(groups, key=lambda item: -(item.length or self._typical)):
            position = heap[0][1]
            dealt[position].append(item.group)
            entry = self._give(position, item.length or self._typical)
            # With different versions each share was checked against the room of its version, so it must be kept.
            if self._given[position] < (instances[position].free if same else shares[position]):
                heapreplace(heap, entry)
            else:
                heappop(heap)
        return [
            Start(worker=instances[position].worker, version=instances[position].version, groups=tuple(groups))
            for position, groups in dealt.items()
            if groups
        ]

    def _take_back(self, position: int) -> None:
        """Undo the assignments of ``fill`` for one instance."""
        given, self._given[position] = self._given[position], 0
        self._samples[position] -= given * self._group_size
        self._kv[position] -= given * self._group_size * self._typical / 2
