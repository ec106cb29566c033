"""Costs of a real run from what it recorded: trace, metrics, log of the stages, and the kernel's times of its roles.

They contain the time for which the parts waited for a core. Of a cost that has several coefficients (decode steps,
train steps, the scheduler's messages), the run shows the sum: a cost file of this machine gives their ratios.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.role_times import RoleTimes, Used
from bench.skewed import step_rows
from staleflow.configs.costs import Costs, LoadCosts, PublishCosts, PullCosts, RewardCosts, ShardCosts
from staleflow.configs.schema import Config
from staleflow.configs.section import Section
from staleflow.metrics.reader import metric_lines
from staleflow.sim.measure import counted_steps
from staleflow.sim.result import Result, StepRow
from staleflow.sim.simulate import TRACE
from staleflow.trace.events import Occupy
from staleflow.trace.fold import Fold
from staleflow.trace.reader import read_lines

METRICS = "metrics.jsonl"
Table = TypeVar("Table", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A real run; seconds and counts are those of its counted steps."""

    rows: Sequence[StepRow]
    """All steps."""
    steps: int
    seconds: float
    used: Mapping[str, Used]
    """Times of the roles, by the subcommand that starts each."""
    metrics: Sequence[Mapping[str, Any]]
    fetch_s: float
    """Seconds from a delivered batch to its training, where the trainer waited for it; 0 if it never did."""
    reward_s: float
    """Mean time from the later of push and last scored group until a group is scored: one worker, in order."""
    engine_s: float
    """Seconds in which the engines decoded."""

    def mean(self, name: str) -> float:
        """Return the mean of a metric over the counted steps."""
        return statistics.fmean(line[name] for line in self.metrics if line.get(name) is not None)

    @property
    def between_s(self) -> float:
        """Seconds of a step beyond training and waiting for its batch: copies, records, publications waited for."""
        times_s = [
            line["t"] - before["t"] - line["time/train"] - line["time/wait_for_batch"]
            for before, line in pairwise(self.metrics)
        ]
        return max(statistics.fmean(times_s), 0.0)

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer did not train."""
        return 1.0 - self.mean("time/train") * self.steps / self.seconds


def read_run(run_dir: Path, config: Config, times: RoleTimes) -> Ran:
    """Read a run that was never restarted."""
    fold = Fold()
    scored: list[tuple[float, float]] = []
    first_s, last_s = 0.0, 0.0
    for line in fold.over(read_lines(run_dir / TRACE)):
        first_s = first_s or line.m / 1e9
        if isinstance(line.event, Occupy) and fold.group is not None:
            scored.append((fold.now_s, fold.now_s - max(last_s, fold.group.pushed_s)))
            last_s = fold.now_s
    rows = step_rows(fold.trained)
    steps, began_s, ended_s = counted_steps(rows, config.staleness.max_staleness + 1)
    first = rows[0].step + (len(rows) - steps) // 2
    lines = [line for line in metric_lines(run_dir / METRICS) if first <= line["step"] < first + steps]
    busy_s = [
        (1.0 - line["rollout/idle_ratio"]) * (line["t"] - before["t"]) * line["rollout/instances"]
        for before, line in pairwise(lines)
    ]
    return Ran(
        rows=rows,
        steps=steps,
        seconds=ended_s - began_s,
        used=times.between(first_s + began_s, first_s + ended_s),
        metrics=lines,
        fetch_s=_fetch_s(rows, lines),
        reward_s=statistics.fmean(took for at, took in scored if began_s <= at < ended_s),
        engine_s=statistics.fmean(busy_s) * steps,
    )


def _fetch_s(rows: Sequence[StepRow], lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean time from delivery to training of the batches that were delivered to a waiting trainer."""
    of = {row.step: row for row in rows}
    waited = [line for line in lines if of[line["step"]].began_s == of[line["step"]].delivered_s]
    extra_s = [
        of[line["step"]].ended_s - of[line["step"]].began_s - line["time/train"] - line["time/publish_total"]
        for line in waited
    ]
    return max(statistics.fmean(extra_s), 0.0) if extra_s else 0.0


def costs_of(ran: Ran, base: Costs, config: Config) -> Costs:
    """Return the costs of the run that it shows directly; the others are those of ``base``."""
    assert base.trainer is not None
    tokens = statistics.fmean(row.tokens for row in ran.rows)
    trajectories = config.trainer.batch_size * config.rollout.group_size
    tokens += trajectories * config.simulation.prompt_tokens
    based_s = base.trainer.fixed_s + base.trainer.token_s * tokens + base.trainer.trajectory_s * trajectories
    return msgspec.structs.replace(
        base,
        source="a real run",
        shard=scaled(base.shard or ShardCosts(), 1.0, fetch_group_s=ran.fetch_s / config.trainer.batch_size),
        publish=PublishCosts(fixed_s=ran.mean("time/publish_total")),
        pull=PullCosts(fixed_s=max(ran.mean("time/pull") - ran.mean("time/pause"), 0.0)),
        load=LoadCosts(fixed_s=ran.mean("time/pause")),
        reward=RewardCosts(group_s=ran.reward_s),
        trainer=scaled(base.trainer, ran.mean("time/train") / based_s, between_s=ran.between_s),
    )


def rescaled(costs: Costs, ran: Ran, result: Result) -> Costs:
    """Scale the costs of engines and scheduler, so that a step takes them as long as in the run.

    ``result``: a simulation with ``costs``, of as many steps.
    """
    assert costs.engine is not None
    assert costs.scheduler is not None
    steps = len(result.steps)
    engine_s = sum(engine.busy_s for engine in result.engines) / steps
    scheduler_s = result.scheduler_busy * result.seconds / steps
    used = ran.used["scheduler"]
    return msgspec.structs.replace(
        costs,
        engine=scaled(costs.engine, ran.engine_s / ran.steps / engine_s),
        scheduler=scaled(costs.scheduler, (used.cpu_s + used.waited_s) / ran.steps / scheduler_s),
    )


def scaled(table: Table, factor: float, **others: float) -> Table:
    """Multiply all seconds of a table; set ``others``."""
    values = {name: getattr(table, name) for name in table.__struct_fields__}
    times = {name: value * factor for name, value in values.items() if isinstance(value, float)}
    return msgspec.structs.replace(table, **times | others)
