"""``metrics.jsonl``: one line per train step, with the metrics of the trainer and the scheduler.

A resumed run appends to the file; an incomplete last line is truncated first.
"""

import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from staleflow.metrics.names import held_out
from staleflow.process.clock import Clock
from staleflow.protocols.consistency.effects import Consumed, Pushed, Released, Reserved, Sealed
from staleflow.protocols.consistency.ids import BatchId, GroupId, LeaseId, Lineage, Step, Version
from staleflow.protocols.consistency.limits import Bound, Limits
from staleflow.protocols.consistency.machine import Machine
from staleflow.servers.scheduler.coordination.instance import Instance
from staleflow.servers.scheduler.ledger.totals import Totals
from staleflow.servers.scheduler.lengths.expected import Lengths

log = logging.getLogger(__name__)

Line = dict[str, float | int | None]


class StepMetrics:
    """Collects the scheduler's metrics between two steps and writes the lines."""

    def __init__(
        self, path: Path, limits: Limits, group_size: int, totals: Totals, lengths: Lengths, clock: Clock
    ) -> None:
        self._path = path
        self._clock = clock
        self._limits = limits
        self._group_size = group_size
        self._totals = totals
        self._lengths = lengths
        self._batches: dict[BatchId, Sealed] = {}
        self._staleness: dict[Step, tuple[float, int, float]] = {}
        self._since_ns = 0
        self._tokens = 0
        self._samples = 0
        self._busy: dict[str, tuple[float, int]] = {}
        self._pulls_s: list[float] = []
        """Durations of the pulls of this step."""
        self._pauses_s: list[float] = []
        """Times for which loads of this step paused engines."""
        self._paused_s: dict[str, float] = {}
        self._since_ms: dict[LeaseId, int] = {}
        self._leases_s: list[float] = []
        """Lease durations of the groups pushed in this step."""
        lines = _whole_lines(path)
        self.last = _decoded(path, lines[-1]) if lines else {}
        """The last written line."""
        starts = (_start(_decoded(path, raw)) for raw in lines if b"eval" in raw)
        self.first: Line = next(filter(None, starts), Line())
        """Step, lineage and value of the first evaluation: the baseline for monitors that attach later."""
        self.newest: Line = dict(self.last)
        """The newest value of every key."""

    # --- events ----------------------------------------------------------------------------------------------

    def pushed(self, samples: list[int]) -> None:
        """Count a pushed group. ``samples``: tokens of each sample."""
        self._totals.counts.samples_pushed += len(samples)

    def pulled(self, worker: str, seconds: float, paused_s: float) -> None:
        """Record a load: the time since its command, and the total time for which loads have paused the engine."""
        self._pulls_s.append(seconds)
        before_s = self._paused_s.get(worker)
        self._paused_s[worker] = paused_s
        if before_s is not None and paused_s > before_s:  # else the first load, or an engine that does not measure
            self._pauses_s.append(paused_s - before_s)

    def on_reserved(self, effect: Reserved) -> None:
        self._since_ms[effect.lease] = self._clock.now_ms()

    def on_pushed(self, effect: Pushed) -> None:
        since_ms = self._since_ms.pop(effect.lease, None)
        if since_ms is not None:  # unknown after a restart of the scheduler
            self._leases_s.append((self._clock.now_ms() - since_ms) / 1000)

    def on_released(self, effect: Released) -> None:
        self._since_ms.pop(effect.lease, None)

    def resume(self, machine: Machine) -> None:
        """Restore the sealed batches that are not consumed yet."""
        for step in range(max(machine.version, 0), machine.next_step):
            if (sealed := machine.sealed_batch(Step(step))) is not None:
                self._remember(sealed)

    def on_sealed(self, effect: Sealed) -> None:
        self._remember(effect)
        oldest = effect.step - self._limits.max_staleness if self._limits.bound is Bound.TRAJECTORY else 0
        self._totals.sealed(effect, Version(oldest))

    def _remember(self, effect: Sealed) -> None:
        self._batches[effect.batch] = effect
        while len(self._batches) > 64:
            del self._batches[next(iter(self._batches))]
        ages = [effect.step - member.version for member in effect.members]
        masked = effect.masked_tokens / effect.tokens if effect.tokens else 0.0
        self._staleness[effect.step] = (sum(ages) / len(ages), max(ages), masked)

    def members(self, batch: BatchId) -> list[GroupId]:
        """Return the groups of a batch that is sealed, or was consumed by this process."""
        sealed = self._batches.get(batch)
        return [] if sealed is None else [member.group for member in sealed.members]

    def on_consumed(self, effect: Consumed) -> None:
        sealed = self._batches.get(effect.batch)  # get, not pop: after a failed commit it is consumed again
        if sealed is not None:
            samples = len(sealed.members) * self._group_size
            self._totals.consumed(effect, sealed, samples)

    # --- the line --------------------------------------------------------------------------------------------

    def step(
        self, step: Step, values: dict[str, float], machine: Machine, instances: Iterable[Instance], now_ns: int
    ) -> None:
        """Write the line of a step, once per step and lineage. The trainer's value wins if both report a key.

        Values that the trainer adds to a step later, or reports before the first step (an evaluation), become a line of
        their own. Values that are not finite are omitted: JSON cannot represent them.
        """
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        lineage = machine.lineage
        is_repeat = self.last.get("step") == step and self.last.get("lineage") == lineage
        if is_repeat and values.keys() <= self.last.keys():
            return
        line: Line = {"step": step, "lineage": lineage, "version": machine.version, "t": now_ns / 1e9}
        if not is_repeat and 0 <= step < machine.version:
            line.update(self._off_policy(step))
            line.update(in_flight(machine, self._limits))
            line.update(self._rollout(list(instances), now_ns))
            line.update(self._rates(now_ns))
            line.update(self._waits())
            line.update(self._lengths.quality())
        line.update(values)
        self.last = line
        self.newest.update(line)
        self._write(line)

    def evaluation(self, lineage: Lineage, version: Version, values: dict[str, float], now_ns: int) -> None:
        """Write the line of an evaluation of ``version``, at the step that published it. Later steps may have lines
        already."""
        step = version - 1
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        self.newest.update(values)
        self._write({"step": step, "lineage": lineage, "version": version, "t": now_ns / 1e9, **values})

    def _write(self, line: Line) -> None:
        self.first = self.first or _start(line)
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            log.warning("metrics of step %s not written to %s: %s", line["step"], self._path, error)

    def _off_policy(self, step: Step) -> Line:
        counts = self._totals.counts
        staleness = self._staleness.get(step)  # None if the step was consumed before a restart
        of_step: Line = {}
        if staleness is not None:
            of_step = dict(
                zip(("off_policy/mean", "off_policy/max", "staleness/masked_token_ratio"), staleness, strict=True)
            )
        self._staleness = {k: v for k, v in self._staleness.items() if k > step}
        return {
            **of_step,
            "staleness/violations": counts.violations,
            "staleness/dropped": sum(counts.drops.values()),
            "staleness/length_bias": length_bias(self._totals),
        }

    def _rollout(self, instances: list[Instance], now_ns: int) -> Line:
        busy = share = 0.0
        for instance in instances:
            before_s, before_ns = self._busy.get(instance.worker, (0.0, 0))
            if before_ns:
                busy += instance.stats.busy_s - before_s
                share += (now_ns - before_ns) / 1e9
            self._busy[instance.worker] = (instance.stats.busy_s, now_ns)
        return {
            "rollout/instances": len(instances),
            "rollout/running": sum(instance.stats.running for instance in instances),
            "rollout/waiting": sum(instance.stats.waiting for instance in instances),
            "rollout/idle_ratio": max(0.0, 1.0 - busy / share) if share else 0.0,
        }

    def _waits(self) -> Line:
        """Return the mean pull, pause and lease durations of this step; a key is omitted if there were none."""
        taken = {"time/pull": self._pulls_s, "time/pause": self._pauses_s, "time/reserve": self._leases_s}
        self._pulls_s, self._pauses_s, self._leases_s = [], [], []
        return {name: sum(seconds) / len(seconds) for name, seconds in taken.items() if seconds}

    def _rates(self, now_ns: int) -> Line:
        counts = self._totals.counts
        tokens, samples = counts.tokens_trained - self._tokens, counts.samples_trained - self._samples
        seconds = (now_ns - self._since_ns) / 1e9
        first = not self._since_ns
        self._since_ns, self._tokens, self._samples = now_ns, counts.tokens_trained, counts.samples_trained
        if first or seconds <= 0:
            return {"perf/tokens_per_second": 0.0, "perf/samples_per_second": 0.0}
        return {"perf/tokens_per_second": tokens / seconds, "perf/samples_per_second": samples / seconds}


def length_bias(totals: Totals) -> float:
    """Return mean trained length / mean sampled length: 1.0 without bias, and before the first trained step."""
    counts = totals.counts
    if not counts.samples_trained or not counts.samples_pushed or not counts.tokens_pushed:
        return 1.0
    whole = counts.tokens_trained + counts.tokens_masked
    return (whole / counts.samples_trained) / (counts.tokens_pushed / counts.samples_pushed)


def in_flight(machine: Machine, limits: Limits) -> Line:
    """Return the version lag of the groups in generation and of those that wait to be trained.

    Empty under the token bound: without a deadline, the version of a group cannot be derived.
    """
    if limits.bound is not Bound.TRAJECTORY:
        return {}
    rows = [(machine.version - (deadline - limits.max_staleness), row) for deadline, *row in machine.window()]
    return {
        **_spread("off_policy/in_flight", [(age, row[0]) for age, row in rows]),
        **_spread("off_policy/in_queue", [(age, row[1] + row[2]) for age, row in rows]),
    }


def _spread(name: str, ages: list[tuple[int, int]]) -> Line:
    total = sum(count for _, count in ages)
    mean = sum(age * count for age, count in ages) / total if total else 0.0
    return {f"{name}/mean": mean, f"{name}/max": max((age for age, count in ages if count), default=0)}


def _whole_lines(path: Path) -> list[bytes]:
    """Return the lines of the file after cutting off a torn last one."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        os.truncate(path, len(whole))
    return whole.splitlines()


def _decoded(path: Path, raw: bytes) -> Line:
    try:
        return msgspec.json.decode(raw, type=Line)
    except msgspec.DecodeError:
        log.warning("%s has a line that is not a metrics line", path)
        return {}


def _start(line: Line) -> Line:
    """Return the part of a line that starts the held-out curve; empty if the line has no evaluation."""
    key = next((key for key in held_out(line) if line.get(key) is not None), None)
    return {} if key is None else {name: line[name] for name in ("step", "lineage", key) if name in line}
