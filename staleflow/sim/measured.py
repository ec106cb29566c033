"""Measure a real run and return overrides of its configuration, so that the run can be simulated and planned.

All values come from the trace: lengths and durations of groups, and the times of the trainer, the stages and the
loading of weights. A trace has the tokens of a group, not of each of its trajectories, so differences inside a group
are lost. The split of a streaming trainer's time into computing and waiting is not in the trace but in the metrics
beside it.
"""

from pathlib import Path
from statistics import median

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.metrics.reader import metric_lines
from staleflow.trace import events
from staleflow.trace.fold import Fold
from staleflow.trace.reader import Line, read_lines

LENGTHS = "lengths.jsonl"
METRICS = "metrics.jsonl"
COMPUTED = ("time/train", "time/publish")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measured values. Medians are in seconds; 0.0 if the trace has no such event."""

    lengths: list[int]
    """Mean tokens of a trajectory, group by group, in the order of their pushes."""
    engines: int
    """Maximum number of rollout workers attached at once."""
    token_s: float
    """Time of one token of a running trajectory."""
    train_s: float
    """Time from a batch (or the end of the previous step, if that is later) to the next version; without the time that
    a streaming trainer waited in between."""
    stages_s: float
    """Time from a pushed group to an occupied one."""
    pull_s: float
    """Time from a version's publish to an instance that has pulled it."""

    def overrides(self, lengths: Path) -> tuple[str, ...]:
        """Return ``key=value`` overrides; write ``lengths``, which one of them names."""
        lengths.write_text("".join(f'{{"tokens": {length}}}\n' for length in self.lengths))
        return (
            "rollout.engine=simulated",
            "trainer.backend=simulated",
            "rollout.simulated.lengths=trace",
            f"rollout.simulated.trace={lengths}",
            "rollout.simulated.trace_column=tokens",
            f"rollout.max_new_tokens={max(self.lengths)}",
            "rollout.simulated.k1=0.0",
            f"rollout.simulated.k2={self.token_s!r}",
            "rollout.simulated.k3=0.0",
            "rollout.simulated.k4=0.0",
            "rollout.pool=[]",
            f"rollout.workers={self.engines}",
            f"trainer.simulated_step_s={self.train_s!r}",
            f"simulation.reward_s={self.stages_s!r}",
            f"simulation.pull_s={self.pull_s!r}",
        )


def measure(trace: Path) -> Measured:
    """Read a trace. Raise ``ConfigError`` if it is none, or if no step of it was trained."""
    fold = Fold()
    totals = _Totals(fold)
    for line in fold.over(read_lines(trace)):
        totals.add(line)
    if not totals.train_s or not totals.lengths:
        raise ConfigError("trace", str(trace), "a run that trained a step: this one has none to learn from")
    train_s = _computed_s(trace.parent / METRICS) if totals.streamed else totals.train_s
    return Measured(
        lengths=totals.lengths,
        engines=totals.max_engines,
        token_s=median(totals.token_s),
        train_s=median(train_s),
        stages_s=median(totals.stages_s) if totals.stages_s else 0.0,
        pull_s=median(totals.pull_s) if totals.pull_s else 0.0,
    )


def _computed_s(metrics: Path) -> list[float]:
    """Return the seconds that the trainer computed for each step. Raise ``ConfigError`` if they were not recorded."""
    lines = metric_lines(metrics)
    computed_s = [sum((line.get(name) or 0.0 for name in COMPUTED), 0.0) for line in lines if COMPUTED[0] in line]
    if not computed_s:
        allowed = f"a run that streamed needs its {METRICS} beside its trace, with {COMPUTED[0]} of a step at least"
        raise ConfigError("trace", str(metrics.parent), allowed)
    return computed_s


class _Totals:
    """Durations in the lines that ``fold`` has applied. Nothing is measured across two incarnations."""

    def __init__(self, fold: Fold) -> None:
        self.lengths: list[int] = []
        self.token_s: list[float] = []
        self.train_s: list[float] = []
        self.stages_s: list[float] = []
        self.pull_s: list[float] = []
        self.max_engines = 0
        self.streamed = False
        self._fold = fold
        self._engines: dict[str, None] = {}
        self._published: dict[tuple[int, int], float] = {}
        self._free_s = 0.0
        self._since_s = -1.0
        """Time of the last line of the incarnation before; -1 in the first."""

    def add(self, line: Line) -> None:
        """Add the line that the fold applied last."""
        fold, group, batch = self._fold, self._fold.group, self._fold.batch
        match line.event:
            case events.Open():
                self._engines.clear()
                self._since_s = fold.now_s if fold.incarnation > 1 else -1.0
            case events.Reserve() as event:
                self._engines[event.worker] = None
                self.max_engines = max(self.max_engines, len(self._engines))
            case events.Detach() as event:
                self._engines.pop(event.worker, None)
            case events.Push() as event:
                tokens = event.tokens / (fold.opening.group_size if fold.opening else 1)
                if tokens >= 1 and not event.truncated:
                    self.lengths.append(round(tokens))
                    self._add(self.token_s, group.reserved_s if group else None, per=tokens)
            case events.Occupy():
                self._add(self.stages_s, group.pushed_s if group else None)
            case events.Publish() as event:
                self._published[event.lineage, event.version] = fold.now_s
            case events.Pull() as event:
                self._add(self.pull_s, self._published.get((event.lineage, event.version)))
            case events.Claim():
                self.streamed = True
            case events.Consume():
                began_s = batch.delivered_s if batch else None
                self._add(self.train_s, None if began_s is None else max(began_s, self._free_s))
                self._free_s = fold.now_s
            case _:
                pass

    def _add(self, where: list[float], began_s: float | None, *, per: float = 1.0) -> None:
        if began_s is not None and began_s > self._since_s:
            where.append((self._fold.now_s - began_s) / per)
