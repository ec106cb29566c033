"""State that spans several snapshots: curves, rates, and the use of the trainer's time."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from staleflow.metrics.names import held_out
from staleflow.metrics.reader import numbers
from staleflow.monitor.lineages import Lineages
from staleflow.protocols.wire.messages import SchedulerStatus
from staleflow.supervisor.view import Snapshot

MAX_CURVE_STEPS = 80
"""Maximum number of steps in a curve."""
MAX_SPARKS = 60
"""Maximum number of values in an engine's curve, at least ``SPARK_INTERVAL_S`` apart."""
SPARK_INTERVAL_S = 0.9
TRAINER_WINDOW_S = 60.0
"""Window for the shares of the trainer's time."""
STEP_TIMES = ("time/step", "time/wait_for_batch", "time/train", "time/publish", "time/checkpoint", "time/eval")
STALLS = {"time/publish": "publish", "time/checkpoint": "checkpoint", "time/eval": "eval"}
"""Stalls of a trainer that has its batch, which only its metrics show."""
MAX_STALL_STEPS = 20
"""Number of steps whose stalls divide the time with a batch."""


@dataclass(slots=True)
class History:
    """Accumulated history of a run; call ``see`` with every snapshot in order."""

    rewards: dict[int, float] = field(default_factory=dict[int, float])
    losses: dict[int, float] = field(default_factory=dict[int, float])
    held_out: dict[int, float] = field(default_factory=dict[int, float])
    """Rewards, losses and held-out rewards by step, without steps that were rolled back."""
    steps: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(elapsed seconds, version) of each version since the last rollback."""
    staleness_mean: float | None = None
    """Mean staleness of the last step."""
    staleness_max: int | None = None
    """Maximum staleness over all steps."""
    masked: float | None = None
    """Masked share of the last step's tokens."""
    trained_per_s: float = 0.0
    step_times: tuple[tuple[str, float], ...] = ()
    generated: deque[float] = field(default_factory=lambda: deque[float](maxlen=MAX_SPARKS))
    """Tokens per second of all engines."""
    sparks: dict[str, deque[float]] = field(default_factory=dict[str, deque[float]])
    """Tokens per second of each engine, by worker."""
    trainer: deque[tuple[float, str]] = field(default_factory=deque[tuple[float, str]])
    """(elapsed seconds, activity of the trainer from then on)."""
    _with_batch: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    """Seconds of the last steps with a batch, by activity."""
    _held_out_key: str = ""
    """Metric of ``held_out``: the first one that a line has."""
    _sparked_s: float = -SPARK_INTERVAL_S
    _lineages: Lineages = field(default_factory=Lineages)

    def see(self, snapshot: Snapshot) -> None:
        """Add one snapshot."""
        newest, first = snapshot.status.metrics, snapshot.status.first_metrics
        for line in (*([numbers(first)] if first else ()), *snapshot.lines, numbers(newest)):
            self.line(line)
        version = snapshot.status.version
        if self.steps and 0 <= version < self.steps[-1][1]:
            self.steps.clear()
        if version >= 0 and (not self.steps or version > self.steps[-1][1]):
            self.steps.append((snapshot.elapsed_s, version))
        if snapshot.elapsed_s >= self._sparked_s + SPARK_INTERVAL_S:
            self._sparked_s = snapshot.elapsed_s
            self._spark(snapshot.status)
        self._see_trainer(snapshot)

    def _spark(self, status: SchedulerStatus) -> None:
        rates = {instance.worker: instance.tokens_per_s for instance in status.instances}
        if rates:
            self.generated.append(sum(rates.values()))
        self.sparks = {worker: self.sparks.get(worker) or deque(maxlen=MAX_SPARKS) for worker in rates}
        for worker, rate in rates.items():
            self.sparks[worker].append(rate)

    def _see_trainer(self, snapshot: Snapshot) -> None:
        status, now_s = snapshot.status, snapshot.elapsed_s
        if status.version < 0 or status.finished or status.trained:
            return
        self.trainer.append((now_s, status.trainer_waits or "trains"))
        while len(self.trainer) > 1 and self.trainer[1][0] <= now_s - TRAINER_WINDOW_S:
            self.trainer.popleft()

    def trainer_time(self) -> tuple[tuple[str, float], ...]:
        """Return the shares of the trainer's activities in the last minute, training first.

        The time with a batch is divided as in its last steps. Before there are two samples, return the shares of its
        last step.
        """
        if len(self.trainer) < 2:
            return self._last_step()
        seconds: dict[str, float] = {}
        samples = list(self.trainer)
        for (began_s, doing), (ended_s, _) in pairwise(samples):
            began_s = max(began_s, samples[-1][0] - TRAINER_WINDOW_S)
            seconds[doing] = seconds.get(doing, 0.0) + ended_s - began_s
        whole_s = sum(seconds.values())
        if whole_s <= 0:
            return ()
        with_batch_s = seconds.pop("trains", 0.0)
        seconds |= {doing: with_batch_s * share for doing, share in self._shares_with_batch().items()}
        shares = ((doing, s / whole_s) for doing, s in seconds.items() if s)
        return tuple(sorted(shares, key=lambda it: (it[0] != "trains", -it[1])))

    def _shares_with_batch(self) -> dict[str, float]:
        """Return the shares of the time with a batch in the last steps, by activity."""
        totals = {"trains": 0.0} | dict.fromkeys(STALLS.values(), 0.0)
        for step in self._with_batch.values():
            for doing, seconds in step.items():
                totals[doing] += seconds
        whole_s = sum(totals.values())
        return {doing: s / whole_s for doing, s in totals.items()} if whole_s > 0 else {"trains": 1.0}

    def _last_step(self) -> tuple[tuple[str, float], ...]:
        """Return the shares of the last step from the trainer's metrics, which do not contain the cause of a wait."""
        times = dict(self.step_times)
        step_s, waited_s = times.get("time/step", 0.0), times.get("time/wait_for_batch", 0.0)
        if step_s <= 0:
            return ()
        stalls = {doing: times[key] / step_s for key, doing in STALLS.items() if times.get(key)}
        waited = min(waited_s / step_s, 1.0)
        return (("trains", max(1.0 - waited - sum(stalls.values()), 0.0)), ("its batch", waited), *stalls.items())

    def line(self, line: Mapping[str, Any]) -> None:
        """Add one line of ``metrics.jsonl``; every value is a number or None."""
        if self._lineages.is_old(line):
            return  # the status is older than the file
        self._lineages.take_back(line, self.rewards, self.losses, self.held_out)
        step = int(line.get("step") or 0)
        if (reward := line.get("reward/mean")) is not None:
            self.rewards[step] = float(reward)
        if (loss := line.get("loss")) is not None:
            self.losses[step] = float(loss)
        if (key := next((key for key in held_out(line) if line.get(key) is not None), None)) is not None:
            self._held_out_key = self._held_out_key or key
        if self._held_out_key and (reward := line.get(self._held_out_key)) is not None:
            self.held_out[step] = float(reward)
        if "time/step" in line:
            self._see_times(step, {key: float(line[key]) for key in STEP_TIMES if line.get(key) is not None})
        max_age, rate = line.get("off_policy/max"), line.get("perf/tokens_per_second")
        if (
            max_age is not None or rate is not None
        ):  # line of a step; a restarted scheduler may not know the ages of one
            self.staleness_mean = line.get("off_policy/mean")
            self.masked = line.get("staleness/masked_token_ratio")
        if max_age is not None:
            self.staleness_max = max(int(max_age), self.staleness_max or 0)
        if rate is not None:
            self.trained_per_s = float(rate)

    def _see_times(self, step: int, times: Mapping[str, float]) -> None:
        """Add the times of a step. A checkpoint and an evaluation are left out of steps that have none."""
        self.step_times = tuple(
            (key, s) for key, s in times.items() if s or key not in ("time/checkpoint", "time/eval")
        )
        stalls = {doing: times.get(key, 0.0) for key, doing in STALLS.items()}
        self._with_batch[step] = {"trains": times.get("time/train", 0.0), **stalls}
        while len(self._with_batch) > MAX_STALL_STEPS:
            del self._with_batch[next(iter(self._with_batch))]

    def curve(self, values: Mapping[int, float]) -> tuple[float, ...]:
        """Return the values of the last steps."""
        return tuple(values[step] for step in sorted(values)[-MAX_CURVE_STEPS:])

    def left_s(self, steps: int, window: int = 20) -> float | None:
        """Return the estimated seconds until the last step, at the pace of the recent ones; None if unknown or done."""
        recent = self.steps[-window - 1 :]
        if len(recent) < 3 or recent[-1][1] >= steps:
            return None
        (began, first), (now, last) = recent[0], recent[-1]
        return (steps - last) * (now - began) / (last - first)
