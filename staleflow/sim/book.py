"""All trajectories of a simulated run by number, and the group of each.

The shipped worker moves tokens, not trajectories. So the seed of a request, and every token of a sample, is the number
of its sample: the engine finds the sample to write by the seed, and a shard finds the written sample by the tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from staleflow.clients.rollout.groups import Recipe
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Version
from staleflow.protocols.wire.messages import Assign
from staleflow.sim.engine import SimEngine
from staleflow.sim.sample import Sample
from staleflow.sim.workload import Workload


@dataclass(slots=True, eq=False)
class StartedGroup:
    """A group from its first request on, however often it moves to another engine."""

    version: Version
    """The version of its first lease."""
    lease: LeaseId
    """The last lease that requested any of its samples."""
    samples: list[Sample] = field(default_factory=list[Sample])
    engine: SimEngine | None = None
    """The last engine that had any of them."""

    def written(self, sample: Sample) -> int:
        """Return the number of tokens of one of its samples at this instant."""
        return sample.written if self.engine is None else self.engine.written(sample)


class Book:
    """Draws the samples of a group when the first of them is requested."""

    def __init__(self, workload: Workload) -> None:
        self.samples: list[Sample] = []
        """Samples by number."""
        self._workload = workload
        self._started: dict[tuple[GroupId, LeaseId], StartedGroup] = {}
        """Groups by id and the lease that they started under."""
        self._groups: list[StartedGroup] = []
        """Groups by number of the sample."""

    def number(self, assign: Assign, origin: LeaseId, place: int) -> int:
        """Return the number of a sample that the lease of ``assign`` requests; its group started under ``origin``."""
        group = self._started.get((assign.group, origin))
        if group is None:
            group = self._started[assign.group, origin] = StartedGroup(assign.version, assign.lease)
            for sample in self._workload.samples(assign.group, origin):
                sample.id = len(self.samples)
                self.samples.append(sample)
                self._groups.append(group)
                group.samples.append(sample)
        group.lease = assign.lease
        return group.samples[place].id

    def submitted(self, number: int, engine: SimEngine) -> Sample:
        """Return the sample of that number, and record that it is at ``engine`` from now on."""
        self._groups[number].engine = engine
        return self.samples[number]

    def started(self) -> list[StartedGroup]:
        """Return every started group, in the order of the leases that they started under."""
        return [group for (_, _), group in sorted(self._started.items(), key=lambda item: item[0][1])]

    def discarded_tokens(self, pushed: Mapping[LeaseId, list[Sample]], released: set[LeaseId]) -> int:
        """Return the number of tokens that no shard received and that no lease can push any more.

        ``pushed`` has the samples that shards received, by lease; ``released`` the leases that ended without a push.
        """
        tokens = 0
        for group in self._started.values():
            kept = pushed.get(group.lease, [])
            if kept or group.lease in released:
                tokens += sum(group.written(sample) for sample in group.samples if sample not in kept)
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRecipe(Recipe):
    """The recipe of a run whose samples are in a book."""

    book: Book

    @classmethod
    def with_book(cls, config: Config, book: Book) -> "SimRecipe":
        of = Recipe.of(config)
        return cls(group_size=of.group_size, started=of.started, sampling=of.sampling, seed=of.seed, book=book)

    def sample_seed(self, assign: Assign, sample: int, origin: LeaseId | None = None) -> int:
        """Return the number of the sample."""
        return self.book.number(assign, origin or assign.lease, sample)
