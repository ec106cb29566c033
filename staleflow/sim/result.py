"""Result of a simulated run: the numbers by which runs are compared."""

from dataclasses import dataclass, field, fields
from typing import Any

Busy = list[tuple[float, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One train step."""

    step: int
    delivered_s: float
    """Time at which its batch arrived."""
    began_s: float
    ended_s: float
    """Time at which its version was published."""
    staleness_mean: float
    """Mean over its groups of ``step`` - the oldest version of a trained token."""
    staleness_max: int
    tokens: int
    masked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One life of an engine."""

    name: str
    began_s: float
    ended_s: float
    busy_s: float
    """Seconds with running samples."""
    running: Busy
    """(second, samples running from then on)."""
    loads: list[tuple[float, float, int]]
    """(begin, end, version) of each load of weights."""
    generated: int
    preempted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one run. Shares are of 1; limits and speeds in steps per minute; times in virtual seconds."""

    name: str
    seconds: float
    steps: list[StepRow]
    steps_per_min: float
    """Over all steps but the first and the last ``max_staleness + 1`` (at most a third each): engines are idle at the
    start, and start nothing new at the end."""
    trainer_limit: float
    """Steps per minute if a batch were always ready. 0: a step takes no time."""
    rollout_limit: float
    """Steps per minute if every engine had all slots running during its life and no tokens were lost; over the same
    steps. 0: no engine lived then."""
    staleness_mean: float
    staleness_max: int
    ages: dict[int, int]
    """Trained groups by staleness of their oldest trained token."""
    violations: int
    """Violations of the bound: as counted by the audit of the written trace, or (a peer) trained groups that are too
    old."""
    discarded: float
    """Share of the generated tokens that was discarded, not counting filtered ones."""
    filtered: float
    """Share of the generated tokens that the filter discarded."""
    masked: float
    """Share of the trained batches' tokens that the token bound masks."""
    length_bias: float
    """Mean length trained / mean length drawn for the started groups."""
    engine_idle: float
    trainer_idle: float
    """Share of the time in which the trainer did not train: publishing and checkpoints that it waited for included."""
    engines: list[EngineRow] = field(repr=False)
    drawn: list[int] = field(repr=False)
    """Drawn length of each started trajectory, whether pushed or not."""
    trained: list[int] = field(repr=False)
    """Length of each trained trajectory."""
    scheduler_busy: float = 0.0
    """Share of the time in which the scheduler's core worked, as far as the cost file charges it."""
    shard_busy: float = 0.0
    """The same share for the busiest trajectory server."""
    wire_busy: float = 0.0
    """The same share for the busiest connection."""
    cost_per_step: float = 0.0
    """Price of engines and trainer for a step, over the same steps as ``steps_per_min``; 0: no prices are given."""
    cost_per_1000: float = 0.0
    """The same for 1,000 trained trajectories."""
    truncated: float = 0.0
    """Share of the trained tokens in trajectories that an interrupt cut: ``trainer.mask_truncated`` would exclude
    them."""
    trace_hash: str = ""
    """Hash of the trace's last line: equal for equal runs."""

    def summary(self) -> dict[str, Any]:
        """Return everything but the engines and the single lengths, as plain values."""
        omitted = ("engines", "drawn", "trained")
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in omitted}
