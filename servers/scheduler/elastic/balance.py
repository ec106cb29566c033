"""Measure the balance of rollout and training: the times of the last steps, and the load of each engine over them."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from staleflow.configs.resumable import RESHARDABLE
from staleflow.configs.rules.coordination import samples_started
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.coordination.admission import Step
from staleflow.protocols.coordination.recommend import EngineLoad, Measured, StepTimes
from staleflow.protocols.coordination.view import Cost
from staleflow.servers.scheduler.coordination.instances import Instances

MAX_STEPS = 32
"""Maximum number of measured steps; older ones do not count."""


class Counters(NamedTuple):
    """Counters of an engine since its start."""

    tokens: int
    steps: int
    busy_s: float


class Mark(NamedTuple):
    """State at the end of a step."""

    now_ms: int
    counters: dict[WorkerId, Counters]


class Balance:
    """Measurements since the last change of the engines."""

    def __init__(self, config: Config, instances: Instances, cost_of: Callable[[WorkerId], Cost | None]) -> None:
        """``cost_of``: returns the cost model of an instance; None if it has none."""
        self._config = config
        self._instances = instances
        self._cost_of = cost_of
        self._settle = config.staleness.max_staleness + 2
        """Number of steps after a change whose groups are of the engines before."""
        self._steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)
        self._marks: deque[Mark] = deque(maxlen=MAX_STEPS + 1)
        self._train_s: deque[float] = deque(maxlen=MAX_STEPS)
        self._engines: frozenset[WorkerId] = frozenset()
        self._skip = 0

    @property
    def last(self) -> StepTimes | None:
        """The times of the last step; None right after a change of the engines."""
        return self._steps[-1] if self._steps else None

    def trained(self, train_s: float) -> None:
        """Add the seconds that the trainer reports for the computation of a step."""
        self._train_s.append(train_s)

    def step(self, step: Step, version: int, now_ms: int) -> Measured | None:
        """Add a step, and return the measurement; None after a change of the engines, until they have settled.

        An engine counts once it has loaded weights: until then it cannot work.
        """
        counters = {
            instance.worker: Counters(instance.stats.generated_tokens, instance.stats.steps, instance.stats.busy_s)
            for instance in self._instances
            if instance.stats.version >= 0
        }
        if self._engines != counters.keys():
            self._engines, self._skip = frozenset(counters), self._settle
        if self._skip > 0:
            self._skip -= 1
            self._steps.clear()
            self._marks.clear()
            self._marks.append(Mark(now_ms, counters))
            return None
        self._marks.append(Mark(now_ms, counters))
        starved_s = max(step.starved_s - step.blocked_s, 0.0)
        times = StepTimes(
            seconds=step.seconds, starved=starved_s, blocked=min(step.blocked_s, step.starved_s), pinned=step.pinned_s
        )
        self._steps.append(times)
        return self._measured(version)

    def _measured(self, version: int) -> Measured:
        config, trainer = self._config, self._config.trainer
        elastic = config.rollout.elastic
        return Measured(
            version=version,
            steps=tuple(self._steps),
            engines=tuple(self._load(worker) for worker in sorted(self._engines)),
            batch_samples=trainer.batch_size * samples_started(config.rollout),
            max_staleness=config.staleness.max_staleness,
            min_engines=elastic.min_workers,
            max_engines=elastic.max_workers,
            train_s=sum(self._train_s) / len(self._train_s) if self._train_s else 0.0,
            ranks=trainer.nproc,
            reshards=trainer.backend in RESHARDABLE and trainer.backend != "torch",
        )

    def _load(self, worker: WorkerId) -> EngineLoad:
        first, last = self._marks[0], self._marks[-1]
        before, after = first.counters[worker], last.counters[worker]
        seconds = max((last.now_ms - first.now_ms) / 1000, 1e-9)
        tokens, steps = max(after.tokens - before.tokens, 0), max(after.steps - before.steps, 0)
        instance = self._instances.get(worker)
        stats = None if instance is None else instance.stats
        return EngineLoad(
            name=worker,
            busy=min(max(after.busy_s - before.busy_s, 0.0) / seconds, 1.0),
            running=tokens / steps if steps else 0.0,
            slots=stats.slots if stats else 0,
            tokens_per_s=tokens / seconds,
            kv=stats.kv_tokens / stats.running if stats and stats.running else 0.0,
            cost=self._cost_of(worker),
        )
