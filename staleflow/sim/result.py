"""What came of a simulated run, in the numbers that runs are compared by."""

from dataclasses import dataclass, field, fields
from typing import Any

Busy = list[tuple[float, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One train step."""

    step: int
    delivered_s: float
    """Its batch was there."""
    began_s: float
    ended_s: float
    """Its version was out."""
    staleness_mean: float
    """Over its groups: ``step`` - the oldest version of a token that is trained."""
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
    """Seconds with something running."""
    running: Busy
    """(second, samples that run from then on)."""
    loads: list[tuple[float, float, int]]
    """(begin, end, version) of each load of weights."""
    generated: int
    preempted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run, or one seen of it. Shares are of 1; limits and speeds in steps a minute; times in virtual seconds."""

    name: str
    seconds: float
    steps: list[StepRow]
    steps_per_min: float
    """Over all steps but the first and the last ``max_staleness + 1`` (at most a third each): engines are idle at
    first, and begin nothing new at last."""
    trainer_limit: float
    """If a batch were always there. 0: a step takes no time."""
    rollout_limit: float
    """If every engine had all slots running as long as it lived, and nothing that it writes were lost; over the same
    steps. 0: no engine lived then."""
    staleness_mean: float
    staleness_max: int
    ages: dict[int, int]
    """Trained groups by staleness, of their oldest token that is trained."""
    violations: int
    """Of the bound: as the audit of the written trace counts them, or (a peer) trained groups that are too old."""
    discarded: float
    """Share of the generated tokens that was thrown away, those filtered not counted."""
    filtered: float
    """Share of the generated tokens that the filter threw away."""
    masked: float
    """Share of the trained batches' tokens that the token bound masks."""
    length_bias: float
    """Mean length trained / mean length drawn for the groups that were begun."""
    engine_idle: float
    trainer_idle: float
    engines: list[EngineRow] = field(repr=False)
    drawn: list[int] = field(repr=False)
    """Length of each trajectory that was begun and pushed or not, as it was drawn."""
    trained: list[int] = field(repr=False)
    """Length of each trajectory that was trained."""
    trace_hash: str = ""
    """Hash of the trace's last line: equal for equal runs."""

    def summary(self) -> dict[str, Any]:
        """Everything but the engines and the single lengths, as plain values."""
        left_out = ("engines", "drawn", "trained")
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out}
