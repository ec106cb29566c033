"""What one look cannot tell: curves, rates, and where the trainer's time went. Fed with every snapshot."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from staleflow.metrics.reader import numbers
from staleflow.monitor.lineages import Lineages
from staleflow.supervisor.view import Snapshot

CURVE = 80
"""Steps of a curve."""
SPARKS = 60
"""Looks of an engine's curve, ``SPARK_S`` apart at least."""
SPARK_S = 0.9
MINUTE_S = 60.0
"""Over which the trainer's time is shared out."""
STEP_TIMES = ("time/step", "time/wait_for_batch", "time/train", "time/publish")


@dataclass(slots=True)
class History:
    """Remembers; ``see`` takes in one snapshot after another."""

    rewards: dict[int, float] = field(default_factory=dict[int, float])
    losses: dict[int, float] = field(default_factory=dict[int, float])
    held_out: dict[int, float] = field(default_factory=dict[int, float])
    """These three by step, of the history that survived."""
    steps: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(elapsed seconds, version), once a version, since the last rollback."""
    staleness_mean: float | None = None
    """Of the last step."""
    staleness_max: int | None = None
    """Of all steps seen."""
    masked: float | None = None
    """Share of the last step's tokens."""
    trained_per_s: float = 0.0
    step_times: tuple[tuple[str, float], ...] = ()
    generated: deque[float] = field(default_factory=lambda: deque[float](maxlen=SPARKS))
    """Tokens a second of all engines."""
    sparks: dict[str, deque[float]] = field(default_factory=dict[str, deque[float]])
    """The same of each engine, by its worker."""
    trainer: deque[tuple[float, str]] = field(default_factory=deque[tuple[float, str]])
    """(elapsed seconds, what it does from then on)."""
    _sparked_s: float = -SPARK_S
    _lineages: Lineages = field(default_factory=Lineages)

    def see(self, snapshot: Snapshot) -> None:
        """Takes in one snapshot."""
        newest: Mapping[str, Any] = snapshot.status.get("metrics") or {}
        first: Mapping[str, Any] = snapshot.status.get("first_metrics") or {}
        for line in (*([numbers(first)] if first else ()), *snapshot.lines, numbers(newest)):
            self.line(line)
        version = int(snapshot.status.get("version", -1))
        if self.steps and 0 <= version < self.steps[-1][1]:
            self.steps.clear()
        if version >= 0 and (not self.steps or version > self.steps[-1][1]):
            self.steps.append((snapshot.elapsed_s, version))
        if snapshot.elapsed_s >= self._sparked_s + SPARK_S:
            self._sparked_s = snapshot.elapsed_s
            self._spark(snapshot.status)
        self._see_trainer(snapshot)

    def _spark(self, status: Mapping[str, Any]) -> None:
        instances = status.get("instances") or ()
        rates = {str(it.get("worker") or it.get("name")): float(it.get("tokens_per_s") or 0.0) for it in instances}
        if rates:
            self.generated.append(sum(rates.values()))
        self.sparks = {worker: self.sparks.get(worker) or deque(maxlen=SPARKS) for worker in rates}
        for worker, rate in rates.items():
            self.sparks[worker].append(rate)

    def _see_trainer(self, snapshot: Snapshot) -> None:
        status, now_s = snapshot.status, snapshot.elapsed_s
        if int(status.get("version", -1)) < 0 or "trainer_waits" not in status or status.get("finished"):
            return
        self.trainer.append((now_s, str(status["trainer_waits"]) or "trains"))
        while len(self.trainer) > 1 and self.trainer[1][0] <= now_s - MINUTE_S:
            self.trainer.popleft()

    def trainer_time(self) -> tuple[tuple[str, float], ...]:
        """Shares of what it did in the last minute, training first; before there are two looks, in its last step."""
        if len(self.trainer) < 2:
            return self._last_step()
        seconds: dict[str, float] = {}
        looks = list(self.trainer)
        for (began_s, doing), (ended_s, _) in pairwise(looks):
            began_s = max(began_s, looks[-1][0] - MINUTE_S)
            seconds[doing] = seconds.get(doing, 0.0) + ended_s - began_s
        whole_s = sum(seconds.values())
        if whole_s <= 0:
            return ()
        return tuple(
            sorted(((doing, s / whole_s) for doing, s in seconds.items()), key=lambda it: (it[0] != "trains", -it[1]))
        )

    def _last_step(self) -> tuple[tuple[str, float], ...]:
        """As the trainer says, who does not know what it waited for."""
        times = dict(self.step_times)
        step_s, waited_s = times.get("time/step", 0.0), times.get("time/wait_for_batch", 0.0)
        if step_s <= 0:
            return ()
        waited = min(waited_s / step_s, 1.0)
        return (("trains", 1.0 - waited), ("its batch", waited))

    def line(self, line: Mapping[str, Any]) -> None:
        """Takes in one line of ``metrics.jsonl``; every value is a number or None."""
        if self._lineages.is_old(line):
            return  # a status that is older than the file
        self._lineages.take_back(line, self.rewards, self.losses, self.held_out)
        step = int(line.get("step") or 0)
        if (reward := line.get("reward/mean")) is not None:
            self.rewards[step] = float(reward)
        if (loss := line.get("loss")) is not None:
            self.losses[step] = float(loss)
        if (held_out := line.get("reward/eval")) is not None:
            self.held_out[step] = float(held_out)
        if "time/step" in line:
            self.step_times = tuple((key, float(line[key])) for key in STEP_TIMES if line.get(key) is not None)
        most, rate = line.get("off_policy/max"), line.get("perf/tokens_per_second")
        if most is not None or rate is not None:  # a step's; a scheduler that came back may not know the ages of one
            self.staleness_mean = line.get("off_policy/mean")
            self.masked = line.get("staleness/masked_token_ratio")
        if most is not None:
            self.staleness_max = max(int(most), self.staleness_max or 0)
        if rate is not None:
            self.trained_per_s = float(rate)

    def curve(self, values: Mapping[int, float]) -> tuple[float, ...]:
        """Of the last steps."""
        return tuple(values[step] for step in sorted(values)[-CURVE:])

    def left_s(self, steps: int, window: int = 20) -> float | None:
        """Seconds until the last step at the pace of the last ones; None before there is a pace, and after the end."""
        seen = self.steps[-window - 1 :]
        if len(seen) < 3 or seen[-1][1] >= steps:
            return None
        (began, first), (now, last) = seen[0], seen[-1]
        return (steps - last) * (now - began) / (last - first)
