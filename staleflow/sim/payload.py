"""The payload of a simulated run as its trainer sees it: sizes of groups, and the time to fetch them."""

from collections.abc import Callable, Mapping, Sequence

from staleflow.configs.costs import WireCosts
from staleflow.protocols.consistency.ids import LeaseId
from staleflow.protocols.wire.messages import MemberRef
from staleflow.sim.queues import GIB, Queue
from staleflow.sim.sample import Sample
from staleflow.sim.shard import SimShard
from staleflow.sim.timeline import Timeline


class StoredPayload:
    """The groups at all shards. The trainer has one connection to each."""

    def __init__(
        self,
        timeline: Timeline,
        shards: Sequence[SimShard],
        pushed: Mapping[LeaseId, Sequence[Sample]],
        wire: WireCosts | None,
    ) -> None:
        self._shards = shards
        self._pushed = pushed
        self._wire = wire
        self._down = [Queue(timeline) for _ in shards]

    @property
    def busy_s(self) -> float:
        """Seconds in which the connection that carried most sent payload to the trainer."""
        return max(queue.busy_s for queue in self._down)

    def tokens(self, members: Sequence[MemberRef]) -> int:
        """Return the number of tokens of groups, prompts included."""
        return sum(sample.prompt + sample.written for member in members for sample in self._pushed[member.lease])

    def fetch(self, members: Sequence[MemberRef], done: Callable[[], None]) -> None:
        """Fetch groups from all shards in parallel, then call ``done``; at once if that takes no time."""
        leases: dict[int, list[LeaseId]] = {}
        for member in members:
            leases.setdefault(member.shard, []).append(member.lease)
        left = set(leases)

        def arrived(shard: int) -> None:
            left.discard(shard)
            if not left:
                done()

        if not left:
            done()
        for number, of in leases.items():
            self._fetch(number, of, arrived)

    def _fetch(self, number: int, leases: Sequence[LeaseId], arrived: Callable[[int], None]) -> None:
        shard, wire = self._shards[number], self._wire
        nbytes = sum(shard.nbytes[lease] for lease in leases)
        each_s, both_ways_s = (0.0, 0.0) if wire is None else (wire.gib_s * nbytes / GIB, 2.0 * wire.latency_s)

        def sent() -> None:
            self._down[number].add(each_s, lambda: arrived(number), more_s=both_ways_s)

        shard.fetch(len(leases), nbytes, sent)
