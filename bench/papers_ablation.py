"""Ablation: every strategy turned off alone, from a configuration that has all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.papers_points import Outcomes
from bench.papers_runs import Campaign, Interval
from bench.papers_shapes import Shape
from bench.papers_tables import table

ETA = 2
TRAINER_BOUND = ("staleflow-7b", "distflow-7b")
"""Shapes whose trainer is the limit at this bound, so that no strategy matters much; left out."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy and its overrides, on and off."""

    name: str
    on: tuple[str, ...]
    off: tuple[str, ...]


STRATEGIES = (
    Strategy("routing", ("coordination.routing=cost_model",), ("coordination.routing=round_robin",)),
    Strategy("sync", ("coordination.sync=greedy",), ("coordination.sync=idle",)),
    Strategy("migration", ("coordination.migration=throughput",), ("coordination.migration=none",)),
    Strategy(
        "composition",
        ("coordination.composition=length_clustered", "coordination.ranker=learned", "coordination.lookahead=4"),
        ("coordination.composition=iid",),
    ),
    Strategy("admission", ("coordination.admission=just_in_time",), ("coordination.admission=fill",)),
    Strategy("redundancy", ("rollout.redundancy.samples=1.25",), ("rollout.redundancy.samples=1.0",)),
)


def ablation(campaign: Campaign, shapes: Sequence[Shape], seeds: int) -> str:
    """Return the table of the losses: the share of trained tokens a minute that a run loses without a strategy;
    negative where it gains."""

    def outcomes(shape: Shape, without: Strategy | None = None) -> Outcomes:
        overrides = [one for strategy in STRATEGIES for one in (strategy.off if strategy is without else strategy.on)]
        return campaign.of([shape.world(*overrides, eta=ETA, seed=seed) for seed in range(seeds)])

    shapes = [shape for shape in shapes if shape.name not in TRAINER_BOUND] or shapes
    full = {shape.name: outcomes(shape) for shape in shapes}
    rows = [["all on", *(_speed(full[shape.name]) for shape in shapes)]]
    for strategy in STRATEGIES:
        cells: list[str] = []
        for shape in shapes:
            without = outcomes(shape, strategy)
            losses = [1 - b.net / a.net for a, b in zip(full[shape.name], without, strict=True)]
            loss = Interval.of(losses)
            cells.append(f"{loss.value:+.1%} ± {loss.half:.1%}{_costs(without)}")
        off = ", ".join(override.partition(".")[2] for override in strategy.off)
        rows.append([f"without {strategy.name} (`{off}`)", *cells])
    head = ["", *(shape.name for shape in shapes)]
    return table(f"Ablation, η {ETA}: loss of trained tokens a minute without each strategy", head, rows)


def _speed(outcomes: Outcomes) -> str:
    return f"{Interval.of([one.steps_per_min for one in outcomes])} steps/min{_costs(outcomes)}"


def _costs(outcomes: Outcomes) -> str:
    discarded = fmean(one.discarded for one in outcomes)
    bias = fmean(one.length_bias for one in outcomes)
    return (
        f"; {discarded:.0%} discarded, length bias {bias:.2f}" if discarded >= 0.005 or abs(bias - 1) >= 0.005 else ""
    )
