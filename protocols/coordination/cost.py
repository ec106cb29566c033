"""Routing by the cost model: every group where it adds most tokens a second.

StaleFlow (2601.12784, rollout coordination) routes waiting trajectories, oldest version first, each to where the
modelled throughput rises most, as long as that is at least a share of what it would rise by on an idle engine. StreamRL
(2504.15930, skewness-aware dispatch) adds that long samples want small batches, and that the longest goes first.

Here trajectories that have a version never wait in the scheduler, so there is one level, of groups to begin. How many
groups each instance takes is decided with groups of typical length; then the longest come first, to where there is most
to gain.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.coordination.candidates import candidates, loads, starts_with
from staleflow.protocols.coordination.view import Cost, Instance, Next, Snapshot, Start

UNKNOWN = Cost(k1=0.0, k2=0.0, k3=1.0, k4=64.0)
"""Stands for an instance that nothing is known of, when nothing is known of any: the fewer samples, the more to gain.
Its unit is no second, so nothing is held back by it."""
SPREAD = 0.2
"""Share of its gain that an instance with the mean number of samples is taken for less than an idle one. Fits of equal
engines differ by some percent: that alone should not heap groups on one of them."""


def cost_model(snapshot: Snapshot, min_gain: float) -> list[Start]:
    """The next groups, longest first, each where throughput rises most; none where it rises by less than ``min_gain``
    of what it would on the same instance idle."""
    instances = candidates(snapshot)
    if not instances:
        return []
    usual = usual_cost(snapshot.instances)
    fleet = Fleet(snapshot, instances, usual or UNKNOWN)
    given = fleet.fill(min_gain if usual else 0.0)
    ready = [n if not loads(i) else 0 for n, i in zip(given, instances, strict=True)]
    return fleet.deal(snapshot.next[: sum(ready)], ready)


def typical_length(groups: Sequence[Next]) -> float:
    """Mean of the expected lengths; 0.0 when none is known."""
    known = [item.length for item in groups if item.length > 0]
    return sum(known) / len(known) if known else 0.0


def usual_cost(instances: Sequence[Instance]) -> Cost | None:
    """The mean of what is fitted, for those that it is not fitted for yet; None when it is for nobody."""
    known = [i.cost for i in instances if i.cost is not None]
    if not known:
        return None
    n = len(known)
    return Cost(
        k1=sum(cost.k1 for cost in known) / n,
        k2=sum(cost.k2 for cost in known) / n,
        k3=sum(cost.k3 for cost in known) / n,
        k4=sum(cost.k4 for cost in known) / n,
    )


def samples_of(instance: Instance, group_size: int) -> int:
    """Samples that an instance has, those among them that it has not reported yet."""
    known = instance.running + instance.waiting + (instance.ordered + instance.coming) * group_size
    return min(known, instance.held * group_size)


class Fleet:
    """The instances that could start groups, as they will be with what they are given."""

    def __init__(self, snapshot: Snapshot, instances: list[Instance], usual: Cost) -> None:
        """``usual``: the cost of those that have none."""
        self._snapshot = snapshot
        self._instances = instances
        self._group_size = snapshot.group_size
        self._typical = typical_length(snapshot.next)
        self._costs = [i.cost or usual for i in instances]
        samples = [samples_of(i, self._group_size) for i in instances]
        self._mean = (sum(samples) + self._group_size * len(snapshot.next)) / len(instances)
        self._begin(samples)

    def _begin(self, samples: list[int]) -> None:
        """Nothing is given yet. What is not in the cache yet will be half as long as it is to become, on average."""
        half = self._typical / 2
        self._given = [0] * len(self._instances)
        self._samples = samples
        self._kv = [i.kv_tokens + max(n - i.running, 0) * half for i, n in zip(self._instances, samples, strict=True)]

    def gain(self, position: int) -> float:
        """Tokens a second more if an instance had one group of typical length more."""
        instance, samples, kv = self._instances[position], self._samples[position], self._kv[position]
        after = samples + self._group_size
        before = samples
        if instance.slots and after > instance.slots:
            before, after = min(before, instance.slots), instance.slots
        cost = self._costs[position]
        more = (after - before) * self._typical / 2
        rises = cost.rate(after, kv + more) - cost.rate(before, kv)
        return rises * (1.0 - SPREAD * samples / self._mean)

    def _ideal(self, position: int) -> float:
        """The same were the instance idle."""
        n = min(self._group_size, self._instances[position].slots or self._group_size)
        return self._costs[position].rate(n, n * self._typical / 2)

    def _has_place(self, position: int) -> bool:
        """For one more group, and cache for all of it; an idle instance takes any."""
        instance = self._instances[position]
        if self._given[position] >= instance.free:
            return False
        if not instance.kv_capacity or not self._samples[position]:
            return True
        return self._kv[position] + self._group_size * self._typical <= instance.kv_capacity

    def _give(self, position: int, length: float) -> tuple[float, int]:
        """One group more; what the next one would gain there, as the heaps keep it."""
        self._given[position] += 1
        self._samples[position] += self._group_size
        self._kv[position] += self._group_size * length / 2
        return -self.gain(position), position

    def fill(self, min_gain: float) -> list[int]:
        """How many groups of typical length each instance gets."""
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
        """``groups`` to those that have a share of them; longest first, each where there is most to gain."""
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
            again = self._give(position, item.length or self._typical)
            if self._given[position] < (instances[position].free if same else shares[position]):
                heapreplace(heap, again)
            else:
                heappop(heap)
        return [
            Start(worker=instances[position].worker, version=instances[position].version, groups=tuple(groups))
            for position, groups in dealt.items()
            if groups
        ]

    def _take_back(self, position: int) -> None:
        """As if it had been given nothing."""
        given, self._given[position] = self._given[position], 0
        self._samples[position] -= given * self._group_size
        self._kv[position] -= given * self._group_size * self._typical / 2
