"""``simulate``: run a configuration and return a ``Result``, with an audited trace in between."""

import math
import tempfile
from collections import Counter
from pathlib import Path

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.sim.measure import engine_row, rollout_limit, steps_per_min, trainer_limit
from staleflow.sim.prices import cost_per_1000, cost_per_step
from staleflow.sim.result import Result, StepRow
from staleflow.sim.trainer import Trained
from staleflow.sim.world import World
from staleflow.trace.audit.report import AuditReport, audit

TRACE = "trace.jsonl"


def simulate(
    config: Config, *, steps: int | None = None, seconds: float | None = None, run_dir: Path | None = None
) -> Result:
    """Run ``config`` in virtual time: all of its train steps, or ``steps``, and at most ``seconds``.

    The trace is written to ``run_dir``, which must not have one yet, or is deleted after its audit.
    """
    if steps is not None:
        config = msgspec.structs.replace(config, trainer=msgspec.structs.replace(config.trainer, steps=steps))
    # Its prompts are numbers and lengths: no client submits any.
    config = msgspec.structs.replace(config, prompts=msgspec.structs.replace(config.prompts, submitted=False))
    if run_dir is None:
        with tempfile.TemporaryDirectory(prefix="staleflow-simulate-") as place:
            return _simulate(config, seconds, Path(place))
    run_dir.mkdir(parents=True, exist_ok=True)
    if (run_dir / TRACE).exists():
        raise ConfigError("trace directory", str(run_dir), f"it has a {TRACE} already: another directory")
    return _simulate(config, seconds, run_dir)


def _simulate(config: Config, seconds: float | None, run_dir: Path) -> Result:
    world = World(config, run_dir)
    try:
        world.run(seconds)
    finally:
        world.close()
    return _result(world, audit(run_dir / TRACE))


def _result(world: World, report: AuditReport) -> Result:
    config, trainer = world.config, world.trainer
    trained = trainer.trained
    end_s = trained[-1].ended_s if trained else world.timeline.now_s
    of_age: Counter[int] = Counter()
    rows = [_step(row, world, of_age) for row in trained]
    engines = [
        engine_row(life.worker, life.engine, began_s=life.began_s, ended_s=min(life.ended_s, end_s))
        for life in world.lives
    ]
    generated = sum(engine.generated for engine in engines)
    drawn, of_drawn, lengths, cut = _lengths(world)
    alive_s = sum(engine.ended_s - engine.began_s for engine in engines)
    discarded = world.discarded + world.book.discarded_tokens(world.pushed, world.released)
    groups = sum(len(row.batch.members) for row in trained)
    ages = sum(row.staleness_mean * len(of.batch.members) for row, of in zip(rows, trained, strict=True))
    tokens = sum(row.tokens for row in rows)
    skip = config.staleness.max_staleness + 1
    lives = zip((life.engine for life in world.lives), engines, strict=True)
    priced = zip((life.price for life in world.lives), engines, strict=True)
    per_step = cost_per_step(config, priced, rows, skip)
    return Result(
        name=config.name,
        seconds=end_s,
        steps=rows,
        steps_per_min=steps_per_min(rows, skip),
        trainer_limit=trainer_limit([row.train_s for row in trained], world.charges),
        rollout_limit=rollout_limit(config, lives, drawn, rows, skip),
        staleness_mean=ages / groups if groups else 0.0,
        staleness_max=max((row.staleness_max for row in rows), default=0),
        ages=dict(sorted(of_age.items())),
        violations=report.num_violations,
        discarded=discarded / generated if generated else 0.0,
        filtered=world.filtered / generated if generated else 0.0,
        masked=sum(row.masked for row in rows) / tokens if tokens else 0.0,
        length_bias=(sum(of_drawn) / len(of_drawn)) / (sum(drawn) / len(drawn)) if of_drawn else 1.0,
        scheduler_busy=world.scheduler.busy_s / end_s if end_s else 0.0,
        shard_busy=world.shard_busy_s / end_s if end_s else 0.0,
        wire_busy=world.wire_busy_s / end_s if end_s else 0.0,
        engine_idle=1.0 - sum(engine.busy_s for engine in engines) / alive_s if alive_s else 0.0,
        trainer_idle=1.0 - math.fsum(row.train_s for row in trained) / (end_s - trainer.began_s) if rows else 0.0,
        engines=engines,
        drawn=drawn,
        trained=lengths,
        cost_per_step=per_step,
        cost_per_1000=cost_per_1000(config, per_step),
        truncated=cut / tokens if tokens else 0.0,
        trace_hash=report.last_hash,
    )


def _step(row: Trained, world: World, of_age: Counter[int]) -> StepRow:
    batch = row.batch
    ages: list[int] = []
    tokens = masked = 0
    for member in batch.members:
        segments = [segment for sample in world.pushed[member.lease] for segment in sample.segments]
        fresh = [segment for segment in segments if segment.version >= batch.mask_below]
        ages += [batch.step - min(segment.version for segment in fresh)] if fresh else []
        written = sum(segment.tokens for segment in segments)
        tokens += written
        masked += written - sum(segment.tokens for segment in fresh)
    of_age.update(ages)
    return StepRow(
        step=batch.step,
        delivered_s=row.delivered_s,
        began_s=row.began_s,
        ended_s=row.ended_s,
        staleness_mean=sum(ages) / len(ages) if ages else 0.0,
        staleness_max=max(ages, default=0),
        tokens=tokens,
        masked=masked,
    )


def _lengths(world: World) -> tuple[list[int], list[int], list[int], int]:
    """Return the lengths drawn, the lengths trained of these, all lengths trained, and the sum of those that an
    interrupt cut.

    The drawn lengths are those of groups that started early enough for the bound to decide about them by the end of the
    run: groups still in progress at the end are too long on average.
    """
    trained = [
        sample for row in world.trainer.trained for member in row.batch.members for sample in world.pushed[member.lease]
    ]
    trained_set = set(trained)
    decided = len(world.trainer.trained) - world.config.staleness.max_staleness
    drawn: list[int] = []
    of_drawn: list[int] = []
    for group in world.book.started():
        if group.version < decided:
            drawn += [sample.length for sample in group.samples]
            of_drawn += [sample.written for sample in group.samples if sample in trained_set]
    cut = sum(sample.written for sample in trained if sample.truncated)
    return drawn, of_drawn, [sample.written for sample in trained], cut
