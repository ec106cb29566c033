"""What everybody of one simulated run shares."""

import mmap
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from staleflow.clients.rollout.groups import Recipe
from staleflow.configs.loading.load import Addresses
from staleflow.configs.schema import Config
from staleflow.sim.faults.journal import Journal, Key
from staleflow.sim.faults.network import Network
from staleflow.sim.virtual import Conductor


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
    lent: Mapping[str, mmap.mmap]
    """By name: slabs that rollout workers write into, as their writer has mapped them."""
    flipped: Callable[[Key], bool]
    """Whether a fault has changed or lost what is stored of a push; its worker may send it once more."""
    journal: Journal = field(default_factory=Journal)
    counts: Counter[str] = field(default_factory=Counter[str])
    """What workers and trainers did that is out of the ordinary."""
    broken: set[str] = field(default_factory=set[str])
    """Names of workers that fail at everything at present."""
    contexts: dict[str, int] = field(default_factory=dict[str, int])
    """Name of a rollout worker -> tokens that its engine takes, where that is fewer than others take."""
    poison: bool = False
    """Rollout workers with a valid key push groups that no engine of the run writes."""
    finishing: bool = False
    """The trainer is to end the run at ``last_step``."""
    finished: bool = False
    """It has."""
    last_step: int = 0

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
