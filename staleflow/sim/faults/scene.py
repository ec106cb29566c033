"""State shared by all processes of one simulated run."""

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
    """State shared by the actors; servers know their configuration only."""

    seed: int
    config: Config
    where: Addresses
    conductor: Conductor
    network: Network
    rng: random.Random
    host_of: Callable[[str], str]
    """Host of a process, by its name."""
    lent: Mapping[str, mmap.mmap]
    """Slabs that rollout workers write into, as their writer has mapped them, by name."""
    untrainable: bool
    """True if the trainer's model raises at some groups."""
    false_reports: bool
    """True if rollout workers also report versions that they have not loaded."""
    on_finished: Callable[[], None]
    """Called when a trainer learns that its end of the run is acknowledged."""
    flipped: Callable[[Key], bool]
    """True if a fault has changed or lost the stored payload of a push; its worker may then send it again."""
    journal: Journal = field(default_factory=Journal)
    counts: Counter[str] = field(default_factory=Counter[str])
    """Unusual actions of workers and trainers."""
    broken: set[str] = field(default_factory=set[str])
    """Names of workers that fail at everything at present."""
    contexts: dict[str, int] = field(default_factory=dict[str, int])
    """Name of a rollout worker -> tokens that its engine accepts, where that is fewer than others accept."""
    poison: bool = False
    """True if rollout workers with a valid key push groups that no engine of the run writes."""
    finishing: bool = False
    """True if the trainer is to end the run at ``last_step``."""
    finished: bool = False
    """True if it has ended the run."""
    last_step: int = 0

    @property
    def samples(self) -> int:
        return self.config.rollout.group_size

    @property
    def started(self) -> int:
        """Number of started samples of a group."""
        return Recipe.of(self.config).started

    @property
    def lease_s(self) -> float:
        return self.config.scheduler.lease_s

    @property
    def step_s(self) -> float:
        return self.config.trainer.simulated_step_s
