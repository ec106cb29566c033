"""Distribution of one machine's GPUs over the processes that ``staleflow run`` starts. Pure.

Keys that name GPUs are obeyed. Otherwise the trainer's ranks get the last GPUs and the rollout workers the others, one
engine after the other, so that no GPU has two engines before each has one. Models of stages go where no engine is: an
engine such as vLLM reserves most of its GPU in advance. With too few GPUs processes share them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from staleflow.configs.pools import gpus_of_engine, pools
from staleflow.configs.schema import Config
from staleflow.configs.stages import stages, workers_of
from staleflow.protocols.wire.stages import CRITIC, REFERENCE

GPUs = tuple[int, ...]
"""Indices among the GPUs that the run may see; empty: it sees all of them, or there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The GPUs of each process."""

    rollout: Sequence[GPUs]
    """By number of the worker."""
    trainer: GPUs = ()
    """One for each rank."""
    stages: Mapping[str, Sequence[GPUs]] = field(default_factory=dict[str, Sequence[GPUs]])
    """Of the reference and the critic, by number of the worker. Stages of the user see all GPUs."""

    def table(self) -> Iterator[tuple[int, list[str]]]:
        """Yield each GPU that has a process, with the names of its processes."""
        names: dict[int, list[str]] = {}
        for number, gpus in enumerate(self.rollout):
            for gpu in gpus:
                names.setdefault(gpu, []).append(f"rollout-{number}")
        for rank, gpu in enumerate(self.trainer):
            names.setdefault(gpu, []).append(f"trainer rank {rank}" if len(self.trainer) > 1 else "trainer")
        for stage, workers in self.stages.items():
            for number, gpus in enumerate(workers):
                for gpu in gpus:
                    names.setdefault(gpu, []).append(f"{stage}-{number}")
        yield from sorted(names.items())


def place(config: Config, available: int) -> Placement:
    """Return the GPUs of each process of a run on a machine with ``available`` GPUs."""
    everything = list(range(available))
    widest = max((gpus_of_engine(pool.config) for pool in pools(config)), default=0)
    trainer = list(config.trainer.gpus) or _trainer(config, everything, widest)
    free = [gpu for gpu in everything if gpu not in trainer]
    shared = next((gpus for gpus in (config.rollout.gpus, free, everything) if len(gpus) >= widest), list[int]())
    rollout = list(_engines(config, shared))
    engines = {gpu for gpus in rollout for gpu in gpus}
    unused, without_engine = ([gpu for gpu in gpus if gpu not in engines] for gpus in (free, trainer))
    homes = cycle(unused or without_engine or everything)
    models: list[str] = [stage for stage in (REFERENCE, CRITIC) if stage in stages(config)]
    placed = {stage: [tuple(islice(homes, 1)) for _ in range(workers_of(config, stage))] for stage in models}
    return Placement(rollout=rollout, trainer=tuple(trainer), stages=placed)


def _trainer(config: Config, everything: list[int], widest: int) -> list[int]:
    """Return the last GPUs, those that no rollout worker needs if there are enough."""
    ranks = config.trainer.nproc if config.trainer.backend != "simulated" else 0
    if not 0 < ranks <= len(everything):
        return []
    named = {gpu for pool in pools(config) for gpu in pool.config.rollout.gpus} | set(config.rollout.gpus)
    free = [gpu for gpu in everything if gpu not in named]
    return (free if len(free) >= ranks + (0 if named else widest) else everything)[-ranks:]


def _engines(config: Config, shared: Sequence[int]) -> Iterator[GPUs]:
    """Yield the GPUs of each rollout worker in order: those of its pool, or else of ``shared``, round-robin."""
    next_shared = 0
    for pool in pools(config):
        own = pool.config.rollout.gpus if config.rollout.pool else []
        gpus, first = (own, 0) if own else (shared, next_shared)
        width = max(gpus_of_engine(pool.config), 1 if own or config.rollout.gpus else 0)
        for number in range(pool.workers):
            places = range(first + number * width, first + (number + 1) * width)
            yield tuple(gpus[place % len(gpus)] for place in places) if gpus else ()
        if not own:
            next_shared += pool.workers * width
