"""Prometheus text exposition: current state, counters, and the newest value of every step metric.

The text is built at most once a second, regardless of the number of scrapers. The build yields to the event loop
between chunks of instances, so that requests are not delayed.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from staleflow.configs.stages import graph
from staleflow.metrics.names import METRICS, PLACES, PREFIX, prometheus
from staleflow.net.security import security_mode
from staleflow.servers.scheduler.state import SchedulerState
from staleflow.servers.scheduler.status.step_metrics import StepMetrics

CACHE_MS: Final = 1_000
"""Time for which a built text is reused."""
INSTANCES_PER_CHUNK: Final = 64
"""Number of instances to format before yielding to the event loop."""

Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels, float]


class Family(NamedTuple):
    """A metric family: kind, help text and label names."""

    kind: str
    meaning: str
    labels: tuple[str, ...] = ()


FAMILIES: Final[dict[str, Family]] = {
    "run_info": Family("gauge", "1; the run is in the labels", ("run", "name", "bound", "on_overdue", "security")),
    "uptime_seconds": Family("gauge", "since this scheduler started"),
    "incarnation": Family("gauge", "starts of the scheduler in this run"),
    "lineage": Family("gauge", "the surviving history; one more at each rollback"),
    "trainer_term": Family("gauge", "joins of a trainer; 0 before the first"),
    "model_version": Family("gauge", "newest published version; -1 before the first"),
    "next_step": Family("gauge", "next step to seal"),
    "steps_configured": Family("gauge", "configured train steps of the run"),
    "batch_size": Family("gauge", "groups a step"),
    "max_staleness": Family("gauge", "the bound, in versions"),
    "finished": Family("gauge", "1 once the trainer is done"),
    "trainer_waits": Family("gauge", "1 while the trainer waits for its batch"),
    "groups": Family("gauge", "groups in each state now", ("state",)),
    "window_groups": Family("gauge", "live groups by the steps that are left until they are due", ("due_in", "state")),
    "pinning_groups": Family("gauge", "groups that keep the next step from being sealed"),
    "store_used_ratio": Family("gauge", "share of the scheduler's map that is used; new work is refused at 0.9"),
    "processes": Family("gauge", "attached processes that are alive", ("role",)),
    "instance_version": Family("gauge", "version that an engine has loaded; -1 before the first", ("worker",)),
    "instance_running": Family("gauge", "samples that an engine decodes", ("worker",)),
    "instance_waiting": Family("gauge", "samples that wait at an engine", ("worker",)),
    "instance_kv_used_ratio": Family("gauge", "share of an engine's KV cache that is used", ("worker",)),
    "instance_tokens_per_second": Family("gauge", "tokens that an engine generates a second", ("worker",)),
    "instance_leases": Family("gauge", "leases of an engine", ("worker",)),
    "stage_workers": Family("gauge", "workers of a stage", ("stage",)),
    "stage_waiting": Family("gauge", "groups that wait for a stage", ("stage",)),
    "stage_taken": Family("gauge", "groups in a stage", ("stage",)),
    "steps_total": Family("counter", "steps trained"),
    "groups_reserved_total": Family("counter", "leases given"),
    "groups_pushed_total": Family("counter", "groups pushed"),
    "groups_occupied_total": Family("counter", "groups that became ready to train"),
    "groups_released_total": Family("counter", "groups released before they were ready, by reason", ("why",)),
    "groups_dropped_total": Family("counter", "groups dropped that were ready, by reason", ("why",)),
    "groups_trained_total": Family("counter", "groups trained, by their age in versions", ("staleness",)),
    "groups_moved_total": Family("counter", "groups that went on at another engine"),
    "rejects_total": Family("counter", "requests refused, by code", ("code",)),
    "tokens_generated_total": Family("counter", "tokens generated, those thrown away included"),
    "tokens_pushed_total": Family("counter", "tokens of pushed groups"),
    "tokens_trained_total": Family("counter", "tokens trained, without the masked ones"),
    "tokens_masked_total": Family("counter", "tokens of trained batches that were too old and masked"),
    "samples_pushed_total": Family("counter", "trajectories pushed"),
    "samples_trained_total": Family("counter", "trajectories trained"),
    "violations_total": Family("counter", "groups delivered beyond the bound; anything but 0 is a bug"),
}
"""Families by name without the prefix. In addition, every key of ``metrics.jsonl`` is a gauge of its own."""


def names() -> dict[str, str]:
    """Return every built-in metric name with its kind; metrics of user code are not included."""
    own = {PREFIX + name: family.kind for name, family in FAMILIES.items()}
    return own | {prometheus(name): "gauge" for name in METRICS}


class Exposition:
    """Read-only view of the scheduler that formats the exposition."""

    def __init__(self, state: SchedulerState, metrics: StepMetrics, trainer_waits: Callable[[], bool]) -> None:
        self._config, self._identity, self._phase = state.config, state.identity, state.phase
        self._interpreter, self._registry = state.interpreter, state.registry
        self._instances, self._loads = state.instances, state.loads
        self._metrics = metrics
        self._stages = [node.name for node in graph(state.config)]
        self._started_ms = state.interpreter.clock.now_ms()
        self._cached: tuple[int, bytes] = (-CACHE_MS, b"")
        self._build_lock = asyncio.Lock()
        self._trainer_waits = trainer_waits

    async def text(self) -> bytes:
        """Return the exposition as UTF-8, at most ``CACHE_MS`` old."""
        async with self._build_lock:
            built_ms, text = self._cached
            if self._interpreter.clock.now_ms() - built_ms < CACHE_MS:
                return text
            lines = list(_lines(self._samples()))
            lines += _numbers(self._metrics.newest)
            lines += await self._of_instances()
            text = ("\n".join(lines) + "\n").encode()
            self._cached = self._interpreter.clock.now_ms(), text
            return text

    # --- samples, by family ----------------------------------------------------------------------------------

    def _samples(self) -> Iterator[Sample]:
        yield from self._of_run()
        yield from self._of_ledger()
        yield from self._of_processes()
        yield from self._of_counts()

    def _of_run(self) -> Iterator[Sample]:
        machine, config = self._interpreter.machine, self._config
        info = {
            "run": self._identity.run,
            "name": config.name,
            "bound": config.staleness.bound.value,
            "on_overdue": config.staleness.on_overdue.value,
            "security": security_mode(config),
        }
        yield "run_info", tuple(info.items()), 1
        yield "uptime_seconds", (), (self._interpreter.clock.now_ms() - self._started_ms) / 1000
        yield "incarnation", (), self._identity.incarnation
        yield "lineage", (), machine.lineage
        yield "trainer_term", (), machine.trainer_term
        yield "model_version", (), machine.version
        yield "next_step", (), machine.next_step
        yield "steps_configured", (), config.trainer.steps
        yield "batch_size", (), config.trainer.batch_size
        yield "max_staleness", (), config.staleness.max_staleness
        yield "finished", (), self._phase.finished
        yield "trainer_waits", (), self._trainer_waits()
        yield "store_used_ratio", (), self._interpreter.store.used_share()

    def _of_ledger(self) -> Iterator[Sample]:
        machine = self._interpreter.machine
        for state, count in machine.state_counts().items():
            yield "groups", (("state", state),), count
        for deadline, *counts in machine.window():
            for state, count in zip(("leased", "pushed", "occupied"), counts, strict=True):
                yield "window_groups", (("due_in", str(deadline - machine.next_step)), ("state", state)), count
        yield "pinning_groups", (), len(machine.pins())

    def _of_processes(self) -> Iterator[Sample]:
        roles: dict[str, int] = {}
        for process in self._registry.processes():
            roles[process.role] = roles.get(process.role, 0) + process.alive
        for role, count in roles.items():
            yield "processes", (("role", role),), count
        loads, workers = self._loads.by_stage(), self._registry.stage_workers()
        for stage in self._stages:
            yield "stage_workers", (("stage", stage),), workers.get(stage, 0)
        for stage in self._stages:
            yield "stage_waiting", (("stage", stage),), loads[stage].waiting if stage in loads else 0
        for stage in self._stages:
            yield "stage_taken", (("stage", stage),), loads[stage].taken if stage in loads else 0

    def _of_counts(self) -> Iterator[Sample]:
        counts = self._interpreter.totals.counts
        yield "steps_total", (), counts.steps
        yield "groups_reserved_total", (), counts.reserves
        yield "groups_pushed_total", (), counts.pushes
        yield "groups_occupied_total", (), counts.occupies
        yield from _by("groups_released_total", "why", counts.releases)
        yield from _by("groups_dropped_total", "why", counts.drops)
        trained = {str(age): count for age, count in sorted(counts.staleness.items())}
        yield from _by("groups_trained_total", "staleness", trained)
        yield "groups_moved_total", (), counts.moves
        yield from _by("rejects_total", "code", counts.rejects)
        yield "tokens_generated_total", (), counts.tokens_generated
        yield "tokens_pushed_total", (), counts.tokens_pushed
        yield "tokens_trained_total", (), counts.tokens_trained
        yield "tokens_masked_total", (), counts.tokens_masked
        yield "samples_pushed_total", (), counts.samples_pushed
        yield "samples_trained_total", (), counts.samples_trained
        yield "violations_total", (), counts.violations

    async def _of_instances(self) -> list[str]:
        """Format the samples of all instances: the only part that grows with the number of workers."""
        families: dict[str, list[str]] = {name: [] for name in FAMILIES if name.startswith("instance_")}
        for number, instance in enumerate(list(self._instances)):
            if number % INSTANCES_PER_CHUNK == INSTANCES_PER_CHUNK - 1:
                await asyncio.sleep(0)
            process = self._registry.get(instance.worker)
            label = f'{{worker="{_escaped(process.name if process else instance.worker)}"}}'
            stats = instance.stats
            values = (stats.version, stats.running, stats.waiting, stats.kv_used, stats.tokens_per_s)
            for (name, lines), value in zip(families.items(), (*values, len(instance.leases)), strict=True):
                lines.append(f"{PREFIX}{name}{label} {_shown(value)}")
        return [line for name, lines in families.items() if lines for line in (*_head(name), *lines)]


def _by(name: str, label: str, counts: Mapping[str, int]) -> Iterator[Sample]:
    for key, count in counts.items():
        yield name, ((label, key),), count


def _lines(samples: Iterator[Sample]) -> Iterator[str]:
    """Format samples; those of one family must be adjacent."""
    last = ""
    for name, labels, value in samples:
        if name != last:
            yield from _head(name)
            last = name
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
        yield f"{PREFIX}{name}{f'{{{inside}}}' if inside else ''} {_shown(value)}"


def _head(name: str) -> tuple[str, str]:
    family = FAMILIES[name]
    return f"# HELP {PREFIX}{name} {family.meaning}", f"# TYPE {PREFIX}{name} {family.kind}"


def _numbers(newest: Mapping[str, float | int | None]) -> list[str]:
    """Format the newest value of every key of ``metrics.jsonl``. If two keys map to one name, the first is used."""
    taken = {PREFIX + name for name in FAMILIES}
    lines = list[str]()
    for key, value in newest.items():
        name = prometheus(key)
        if key in PLACES or value is None or name in taken:
            continue
        taken.add(name)
        metric = METRICS.get(key)
        unit = f", in {metric.unit}" if metric and metric.unit else ""
        meaning = f"{metric.meaning}{unit}" if metric else "a number of the trainer's own"
        lines += (f"# HELP {name} {meaning}", f"# TYPE {name} gauge", f"{name} {_shown(value)}")
    return lines


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _shown(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if isinstance(value, bool) else str(value)
