"""What everybody of one simulated run shares."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from staleflow.clients.rollout.groups import Recipe
from staleflow.configs.load import Addresses
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Lineage, TrainerTerm, Version
from staleflow.sim.faults.journal import Journal
from staleflow.sim.faults.network import Network
from staleflow.sim.faults.virtual import Conductor


@dataclass(slots=True)
class Scene:
    """Of the actors; servers know their configuration only."""

    seed: int
    config: Config
    where: Addresses
    conductor: Conductor
    network: Network
    rng: random.Random
    host_of: Callable[[str], str]
    """The machine of a process, by its name."""
    journal: Journal = field(default_factory=Journal)
    counts: Counter[str] = field(default_factory=Counter[str])
    """What workers and trainers did that is out of the ordinary."""
    checkpoints: list[tuple[Lineage, Version]] = field(default_factory=list[tuple[Lineage, Version]])
    """The trainer's own, oldest first."""
    wrote: dict[tuple[int, int], TrainerTerm] = field(default_factory=dict[tuple[int, int], TrainerTerm])
    """The term in which each (lineage, version) was made: the newest that tried, since no older one succeeds then."""
    finishing: bool = False
    """The trainer is to end the run after its next step."""
    finished: bool = False
    """It has."""

    @property
    def samples(self) -> int:
        return self.config.rollout.group_size

    @property
    def started(self) -> int:
        """Samples of a group that are started."""
        return Recipe.of(self.config).started

    @property
    def lease_s(self) -> float:
        return self.config.scheduler.lease_s

    @property
    def step_s(self) -> float:
        return self.config.trainer.simulated_step_s

    @property
    def checkpoint_every(self) -> int:
        return self.config.trainer.checkpoint_every
