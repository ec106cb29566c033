"""Preemptible engines against fixed ones: throughput, lost tokens and cost (RLBoost, arXiv 2510.19225: 1.51 to 1.97
times the throughput, 28 to 49 % better cost efficiency).

Each preemptible engine is lost 0.1 times a minute on average, and another one returns after a minute: without notice,
with a notice of 30 s at which it releases its groups, or with one in which it hands them over with their tokens
(``rollout.handover_s``). The world is that of ``bench.prices``, with H800 at a price of 1 an hour.

    python -m bench.preemptible [--small] [--seeds N]
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import click

from bench.prices import line
from bench.prices_world import FULL, FULL_SIZE, H800, SMALL_SIZE, TRAINER_GPUS, Size, config, costs, costs_file
from bench.progress import tracked
from staleflow.configs.simulation import Preemption
from staleflow.sim.prices import cost_per_1000, cost_per_step
from staleflow.sim.simulate import simulate

DISCOUNTS = (0.3, 0.5)
"""Prices of a preemptible engine in those of a fixed one, to choose from."""
PER_MIN, NOTICE_S, HANDOVER_S, RETURN_S = 0.1, 30.0, 25.0, 60.0
FIXED = 2
SLOTS = 128
"""Samples that an engine decodes at once, and loses at once."""
LOCAL_GBIT = 1e6
HEAD = (
    "engines",
    "losses",
    "steps/min",
    f"of {FIXED} fixed",
    "losses a run",
    "tokens lost",
    *(f"trajectories for the money, at {discount:g} of the price" for discount in DISCOUNTS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Fixed and preemptible engines, and how the latter are lost."""

    fixed: int
    preemptible: int = 0
    losses: str = "-"
    announced: float = 0.0
    handover_s: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.fixed} fixed"] if self.fixed else []
        return " + ".join([*parts, f"{self.preemptible} preemptible"] if self.preemptible else parts)


WAYS = (
    Fleet(fixed=0, losses="without notice"),
    Fleet(fixed=0, losses="30 s notice, groups released", announced=1.0),
    Fleet(fixed=0, losses="30 s notice, groups handed over", announced=1.0, handover_s=HANDOVER_S),
)
FLEETS = (
    Fleet(fixed=FIXED),
    Fleet(fixed=2 * FIXED),
    *(replace(way, fixed=fixed, preemptible=2 * FIXED - fixed) for fixed in (FIXED, 0) for way in WAYS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Means over the seeds."""

    fleet: Fleet
    steps_per_min: float
    lost: float
    """Losses of a run."""
    discarded: float
    cost: tuple[float, ...]
    """Cost of 1,000 trajectories at each discount."""

    def cells(self, base: "Row") -> tuple[str, ...]:
        effects = (f"{own / other:.2f}" for own, other in zip(base.cost, self.cost, strict=True))
        speed, of_base = f"{self.steps_per_min:.3f}", f"{self.steps_per_min / base.steps_per_min:.2f}"
        return str(self.fleet), self.fleet.losses, speed, of_base, f"{self.lost:.1f}", f"{self.discarded:.1%}", *effects


def measure(fleet: Fleet, size: Size, seeds: int) -> Row:
    """Simulate one fleet."""
    runs = [_run(fleet, size, seed) for seed in range(seeds)]
    means = [statistics.fmean(values) for values in zip(*runs, strict=True)]
    return Row(fleet=fleet, steps_per_min=means[0], lost=means[1], discarded=means[2], cost=tuple(means[3:]))


def _run(fleet: Fleet, size: Size, seed: int) -> tuple[float, ...]:
    counts = ((fleet.fixed, False), (fleet.preemptible, True))
    engines = [H800.fleet(count, 1.0, slots=SLOTS, preemptible=preemptible) for count, preemptible in counts if count]
    preemption = Preemption(
        per_min=PER_MIN if fleet.preemptible else 0.0,
        announced=fleet.announced,
        notice_s=NOTICE_S,
        return_s=RETURN_S,
    )
    with costs_file(costs(FULL, LOCAL_GBIT)) as file:
        given = config(
            size,
            engines,
            file,
            trainer_price=float(TRAINER_GPUS),
            seed=seed,
            handover_s=fleet.handover_s,
            preemption=preemption,
        )
        result = simulate(given)
    fixed = {f"rollout-{number}" for number in range(fleet.fixed)}
    skip = given.staleness.max_staleness + 1
    per_1000: list[float] = []
    for discount in DISCOUNTS:
        lives = ((1.0 if _engine(life.name) in fixed else discount, life) for life in result.engines)
        per_1000.append(cost_per_1000(given, cost_per_step(given, lives, result.steps, skip)))
    lost = len(result.engines) - fleet.fixed - fleet.preemptible
    return result.steps_per_min, lost, result.discarded, *per_1000


def _engine(life: str) -> str:
    return life.partition(".")[0]


def rows(size: Size, seeds: int, fleets: Sequence[Fleet] = FLEETS) -> Iterator[Row]:
    """Measure every fleet."""
    for fleet in tracked("fleets", fleets):
        yield measure(fleet, size, seeds)


@click.command()
@click.option("--small", is_flag=True, help="Short runs, in seconds; their numbers mean nothing.")
@click.option("--seeds", default=2, show_default=True, type=click.IntRange(min=1))
def main(small: bool, seeds: int) -> None:
    """Measure and print a table; the first row is the base of the comparison."""
    base: Row | None = None
    click.echo(f"{line(HEAD)}\n{line(['---'] * len(HEAD))}")
    for row in rows(SMALL_SIZE if small else FULL_SIZE, seeds):
        base = base or row
        click.echo(line(row.cells(base)))


if __name__ == "__main__":
    main()
