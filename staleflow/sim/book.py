"""Every trajectory of a simulated run, and what became of its group."""

from dataclasses import dataclass, field

from staleflow.clients.rollout.groups import Recipe
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Version
from staleflow.protocols.wire.messages import Assign
from staleflow.sim.engine import SimEngine
from staleflow.sim.sample import Sample
from staleflow.sim.workload import Workload


@dataclass(slots=True, eq=False)
class Begun:
    """A group in the making, however often it moves from engine to engine."""

    version: Version
    """The newest one when the group began."""
    lease: LeaseId
    """The lease that works on it now, or did last."""
    samples: list[Sample] = field(default_factory=list[Sample])
    engine: SimEngine | None = None
    """The engine that has its samples, or had them last."""

    def written(self, sample: Sample) -> int:
        return sample.written if self.engine is None else self.engine.written(sample)


class Book:
    """Numbers all samples. A request's seed, and every token of a payload, is the number of its sample."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self.begun: dict[tuple[GroupId, LeaseId], Begun] = {}
        """By group and the lease under which it began, in order of beginning."""
        self.samples: list[Sample] = []
        self.group_of: list[Begun] = []
        """By number of the sample."""
        self._workload = workload
        self._seed = seed

    def number(self, assign: Assign, origin: LeaseId, place: int) -> int:
        """Return the number of a sample of a group that began under the lease ``origin``."""
        group = self.begun.get((assign.group, origin))
        if group is None:
            group = self.begun[assign.group, origin] = Begun(assign.version, assign.lease)
            for sample in self._workload.samples(assign.group, origin):
                sample.id = len(self.samples)
                self.samples.append(sample)
                self.group_of.append(group)
                group.samples.append(sample)
        group.lease = assign.lease
        return group.samples[place].id

    def thrown_away(self, taken: dict[LeaseId, list[Sample]], released: set[LeaseId]) -> int:
        """Tokens of samples that no shard took and that no worker goes on with."""
        tokens = 0
        for group in self.begun.values():
            if (used := taken.get(group.lease)) is not None:
                tokens += sum(group.written(sample) for sample in group.samples if sample not in used)
            elif group.lease in released:
                tokens += sum(group.written(sample) for sample in group.samples)
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRecipe(Recipe):
    """The recipe of a run whose samples are in a book."""

    book: Book

    @classmethod
    def of(cls, config: Config, book: Book) -> "SimRecipe":  # type: ignore[override]
        plain = Recipe.of(config)
        return cls(**{name: getattr(plain, name) for name in ("group_size", "started", "sampling", "seed")}, book=book)

    def sample_seed(self, assign: Assign, sample: int, origin: LeaseId | None = None) -> int:
        return self.book.number(assign, origin or assign.lease, sample)
