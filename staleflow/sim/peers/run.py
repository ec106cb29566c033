"""``simulate_peer``: run a configuration under a peer's rule and return a ``Result``.

The trainer takes a batch when it is free and there is one, works for ``simulated_step_s`` or as long as the cost file
has it, and publishes the next version at the end of its step (or at its beginning, see ``simulation.publish``). It
stands still while it publishes and writes checkpoints. No scheduler, trajectory server or wire is charged.
"""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Version
from staleflow.sim.charges import Charges
from staleflow.sim.check import check
from staleflow.sim.engine import EngineFull
from staleflow.sim.measure import engine_row, rollout_limit, steps_per_min, trainer_limit
from staleflow.sim.peers.pool import Group, Pool
from staleflow.sim.peers.presets import PEERS
from staleflow.sim.prices import cost_per_1000, cost_per_step
from staleflow.sim.result import Result, StepRow
from staleflow.sim.timeline import Timeline
from staleflow.sim.workload import Workload


def simulate_peer(name: str, config: Config, *, steps: int | None = None, seconds: float | None = None) -> Result:
    """Run ``config`` in virtual time under a peer's rule: all of its train steps, or ``steps``, at most ``seconds``."""
    if name not in PEERS:
        raise ConfigError("peer", name, f"one of {', '.join(PEERS)}")
    if config.simulation.events:
        raise ConfigError("simulation.events", len(config.simulation.events), "0: the engines of peers never fail")
    if per_min := config.simulation.preemption.per_min:
        raise ConfigError("simulation.preemption.per_min", per_min, "0: the engines of peers never fail")
    if steps is not None:
        config = msgspec.structs.replace(config, trainer=msgspec.structs.replace(config.trainer, steps=steps))
    check(config, Workload(config), Charges.of(config))
    run = PeerRun(config, name)
    try:
        run.run(seconds)
    except EngineFull as error:
        raise ConfigError("simulation.kv_tokens", config.simulation.kv_tokens, f"{error}; 0 has no end") from error
    return _result(name, run)


class PeerRun:
    """A run under one rule."""

    def __init__(self, config: Config, name: str) -> None:
        kind = PEERS[name]
        self.timeline = Timeline()
        self.pool = Pool(
            config,
            self.timeline,
            kind.on_update,
            arrived=self._arrived,
            filtered=self._filtered,
        )
        self.rule = kind(self.pool)
        self.rows: list[StepRow] = []
        self._steps = config.trainer.steps
        self.train_s: list[float] = []
        """Seconds of training of each started step."""
        self._checkpoint_every = config.trainer.checkpoint_every
        self._ahead = config.simulation.publish == "start"
        self._over = False

    def run(self, seconds: float | None = None) -> None:
        """Run until the last step is trained, ``seconds`` have passed, or no event is left."""
        if seconds is not None:
            self.timeline.at(seconds, self._stop)
        self._publish()
        self.timeline.run(lambda: self._over, self._settle)

    def _arrived(self, group: Group) -> None:
        self.rule.arrived(group)

    def _filtered(self, group: Group) -> None:
        self.rule.filtered(group)

    def _stop(self) -> None:
        self._over = True

    def _settle(self) -> bool:
        """After an event, let the trainer take a batch if it can, and start the groups that may start."""
        if not self.pool.changed:
            return False
        self.pool.changed = False
        self._train()
        self.rule.begin()
        return True

    def _train(self) -> None:
        pool = self.pool
        if pool.training or pool.step >= self._steps:
            return
        batch = self.rule.batch()
        if not batch:
            return
        step, began_s = pool.step, self.timeline.now_s
        pool.take(batch)
        if self._ahead:
            self._publish()
        samples = [sample for group in batch for sample in group.written]
        train_s = pool.charges.train_s(len(batch), sum(sample.prompt + sample.written for sample in samples))
        self.train_s.append(train_s)
        stands_s = 0.0 if self._ahead else pool.charges.publish_s()
        self.timeline.after(train_s + stands_s, lambda: self._trained(step, began_s, batch))

    def _trained(self, step: int, began_s: float, batch: Sequence[Group]) -> None:
        self.rows.append(_row(step, began_s, self.timeline.now_s, batch))
        self._over = len(self.rows) >= self._steps
        if not self._ahead:
            self._publish()
        stands_s = self.pool.charges.between_s()
        if (step + 1) % self._checkpoint_every == 0:
            stands_s += self.pool.charges.checkpoint_s()
        if stands_s:
            self.timeline.after(stands_s, self._free)
        else:
            self._free()

    def _free(self) -> None:
        self.pool.training = False
        self.pool.changed = True

    def _publish(self) -> None:
        self.pool.version = Version(self.pool.version + 1)
        self.pool.changed = True
        self.rule.published()


def _row(step: int, began_s: float, ended_s: float, batch: Sequence[Group]) -> StepRow:
    ages = [step - group.oldest() for group in batch]
    return StepRow(
        step=step,
        delivered_s=began_s,
        began_s=began_s,
        ended_s=ended_s,
        staleness_mean=sum(ages) / len(ages),
        staleness_max=max(ages),
        tokens=sum(sample.written for group in batch for sample in group.written),
        masked=0,
    )


def _result(name: str, run: PeerRun) -> Result:
    pool, rows = run.pool, run.rows
    config, end_s = pool.config, run.timeline.now_s
    batches = pool.steps[: len(rows)]
    ages = [step - group.oldest() for step, batch in enumerate(batches) for group in batch]
    engines = [
        engine_row(f"engine-{replica.number}", replica.engine, began_s=0.0, ended_s=end_s) for replica in pool.replicas
    ]
    generated = sum(engine.generated for engine in engines)
    drawn, of_drawn = _decided(pool)
    trained = [sample.written for batch in batches for group in batch for sample in group.written]
    skip = config.staleness.max_staleness + 1
    lives = zip((replica.engine for replica in pool.replicas), engines, strict=True)
    priced = zip((pool.fleet[replica.number].price for replica in pool.replicas), engines, strict=True)
    per_step = cost_per_step(config, priced, rows, skip)
    return Result(
        name=name,
        seconds=end_s,
        steps=rows,
        steps_per_min=steps_per_min(rows, skip),
        trainer_limit=trainer_limit(run.train_s, pool.charges),
        rollout_limit=rollout_limit(config, lives, drawn, rows, skip),
        staleness_mean=sum(ages) / len(ages) if ages else 0.0,
        staleness_max=max(ages, default=0),
        ages=dict(sorted(Counter(ages).items())),
        violations=sum(age > config.staleness.max_staleness for age in ages),
        discarded=pool.lost_tokens / generated if generated else 0.0,
        filtered=pool.filtered_tokens / generated if generated else 0.0,
        masked=0.0,
        length_bias=(sum(of_drawn) / len(of_drawn)) / (sum(drawn) / len(drawn)) if of_drawn else 1.0,
        engine_idle=max(1.0 - sum(engine.busy_s for engine in engines) / (end_s * len(engines)), 0.0) if end_s else 0.0,
        trainer_idle=1.0 - math.fsum(run.train_s[: len(rows)]) / end_s if rows else 0.0,
        engines=engines,
        drawn=drawn,
        trained=trained,
        cost_per_step=per_step,
        cost_per_1000=cost_per_1000(config, per_step),
    )


def _decided(pool: Pool) -> tuple[list[int], list[int]]:
    """Return the lengths drawn, and the lengths trained of these, of groups that started before any that is undecided
    at the end.

    Groups still in progress at the end are too long on average.
    """
    undecided = min((group.version for group in [*pool.running, *pool.finished]), default=pool.version)
    trained = {group for batch in pool.steps for group in batch}
    drawn: list[int] = []
    of_drawn: list[int] = []
    for group in pool.started:
        if group.version < undecided:
            drawn += [sample.length for sample in group.samples]
            if group in trained:
                of_drawn += [sample.written for sample in group.written]
    return drawn, of_drawn
