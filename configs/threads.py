"""Distribution of one machine's cores over the processes of models that ``staleflow run`` starts. Pure.

Keys above 0 are obeyed. The processes whose key is 0 share the other cores evenly, and the ranks of the trainer also
get the remainder. With ``staleness.max_staleness = 0`` the trainer and the engines take turns, so each side gets all
cores. Each process has at least one thread, and together they have no more than the machine has cores if that is
possible: more threads slow all processes down.
"""

from dataclasses import dataclass

from staleflow.configs.pools import workers
from staleflow.configs.schema import Config
from staleflow.configs.stages import stages, threads_of, workers_of
from staleflow.protocols.wire.stages import CRITIC, REFERENCE

WITHOUT_MODEL = ("simulated", "vllm_server")
"""Engines that compute in no process of the run."""


@dataclass(frozen=True, slots=True)
class Threads:
    """Threads of the numeric libraries in one process that has to choose."""

    trainer: int = 1
    """Number for each rank."""
    other: int = 1
    """Number for each rollout worker, reference model and critic."""

    def words(self, config: Config) -> str:
        """Return the chosen numbers for the operator; "" if the configuration gives all of them."""
        chosen = {
            "trainer": not config.trainer.threads and self.trainer,
            "rollout worker": not config.rollout.threads and self.other,
        }
        return ", ".join(f"{number} for each {name}" for name, number in chosen.items() if number)

    def of_trainer(self, config: Config) -> int:
        """Return the threads of each rank of the trainer."""
        return config.trainer.threads or self.trainer

    def of_worker(self, worker: Config) -> int:
        """Return the threads of a rollout worker with this configuration."""
        return worker.rollout.threads or (1 if worker.rollout.engine in WITHOUT_MODEL else self.other)

    def of_stage(self, config: Config, stage: str) -> int:
        """Return the threads of a worker of a stage."""
        return threads_of(config, stage) or self.other


def share(config: Config, cores: int) -> Threads:
    """Return the threads of the processes of a run on a machine with ``cores`` cores."""
    engines = [one.rollout.threads for one in workers(config) if one.rollout.engine not in WITHOUT_MODEL]
    models = [name for name in (REFERENCE, CRITIC) if name in stages(config)]
    others = engines + [threads_of(config, name) for name in models for _ in range(workers_of(config, name))]
    ranks = [config.trainer.threads] * config.trainer.nproc if config.trainer.backend != "simulated" else []
    if config.staleness.max_staleness == 0:
        return Threads(_each(cores, ranks), _each(cores, others))
    each = _each(cores, [*others, *ranks])
    taken = sum(threads or each for threads in others)
    return Threads(max(each, _each(cores - taken, ranks)), each)


def _each(cores: int, given: list[int]) -> int:
    """Return the threads of each process without a given number."""
    return max(1, (cores - sum(given)) // max(1, given.count(0)))
