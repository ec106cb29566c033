"""Measure the gain of other dispatch: placement of single trajectories, numbers of groups at an engine, moments of
synchronization, order inside an engine, sizes of shares. Every variant that the product lacks is an upper limit
(``dispatch_pool``, ``dispatch_variants``).

    python -m bench.dispatch [--parts placement,...] [--shapes tail,...] [--steps 40] [--seeds 2]

Print one table for each part, in virtual time, with the shipped scheduler and rollout worker: steps a minute, mean of
the seeds, and the gain over the first row. All runs of a workload have the same lengths.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from statistics import fmean

import click

from bench.coordination_table import Mean
from bench.dispatch_pool import Mode, pooled
from bench.dispatch_shapes import SHAPES, shape
from bench.dispatch_variants import Order, places, queue_order, same_lengths, typical_length
from bench.progress import tracked
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate

MOVES = "coordination.migration=throughput"
KNOWN = "simulation.known_lengths=true"
POOL: dict[str, Mode] = {"pool, start": "route", "pool, start and move": "move", "pool, tail engine": "tail"}
ORDER: dict[str, Order] = {
    "longest first, lengths known": "longest",
    "longest first, lengths predicted from the prompt": "expected",
    "shortest first, lengths known": "shortest",
}
PLACES = {f"a number of groups: {factor} x slots / group_size": factor for factor in (1.5, 2.0, 3.0)}
QUANTILE = {"lengths known, sized by the 90th percentile": 0.9}

SLOW = ("simulation.pull_s=10", "simulation.load_s=10")
SYNC: dict[str, Sequence[str]] = {
    "`greedy` (default)": (),
    "`threshold`, 64 samples": ("coordination.sync=threshold", "coordination.sync_threshold=64"),
    "`threshold`, 8 samples": ("coordination.sync=threshold",),
    "`idle`": ("coordination.sync=idle",),
    "bound: loads cost nothing": ("simulation.pull_s=0", "simulation.load_s=0"),
}

PARTS: dict[str, dict[str, Sequence[str]]] = {
    "placement": {
        "groups stay (default)": (),
        '`migration = "throughput"`': (MOVES,),
        "the same, `migration_gap = 1.3`": (MOVES, "coordination.migration_gap=1.3"),
        **dict.fromkeys(POOL, ()),
        "bound: every step as fast as on an idle engine": ("rollout.simulated.k1=0", "rollout.simulated.k3=0"),
    },
    "places": {"as many as keep the slots busy (default)": (), **dict.fromkeys(PLACES, ())},
    "sync": SYNC,
    "slow loads": {
        **{variant: (*chosen, *SLOW) for variant, chosen in SYNC.items()},
        "bound: loads cost nothing": ("simulation.pull_s=0", "simulation.load_s=0"),
    },
    "order": {"first in, first out (default)": (), **dict.fromkeys(ORDER, ())},
    "shares": {
        "lengths unknown (default)": (),
        "`min_gain = 0.1`": ("coordination.min_gain=0.1",),
        "lengths known, sized by the mean": (KNOWN,),
        **dict.fromkeys(QUANTILE, (KNOWN,)),
    },
}
"""Variants of each part by name, as overrides of the workload; the first one is the product's default."""
OF: dict[str, tuple[str, ...]] = {
    "placement": ("tail", "slots", "cache"),
    "places": ("slots", "large groups"),
    "sync": ("tail", "slots", "cache"),
    "slow loads": ("tail",),
    "order": ("slots", "cache"),
    "shares": ("slots", "cache"),
}
"""Workloads in which the variants of a part can differ."""


@contextmanager
def patched(variant: str) -> Generator[None]:
    """Simulate the variants that are no configuration."""
    with same_lengths() as lengths:
        if variant in POOL:
            with pooled(POOL[variant]):
                yield
        elif variant in ORDER:
            with queue_order(ORDER[variant], lengths):
                yield
        elif variant in PLACES:
            with places(PLACES[variant]):
                yield
        elif variant in QUANTILE:
            with typical_length(QUANTILE[variant]):
                yield
        else:
            yield


def results(part: str, variant: str, name: str, *, seeds: int, steps: int) -> list[Result]:
    """Simulate a variant on a workload, once a seed."""
    runs: list[Result] = []
    for seed in range(seeds):
        with patched(variant):
            runs.append(simulate(shape(name, *PARTS[part][variant], seed=seed, steps=steps)))
    return runs


def cell(runs: Sequence[Result], base: Sequence[Result]) -> str:
    """Describe the speed, and the gain over the same seeds of ``base``."""
    speed = fmean(run.steps_per_min for run in runs)
    age = fmean(run.staleness_mean for run in runs)
    broken = sum(run.violations for run in runs)
    gain = Mean.of([run.steps_per_min / other.steps_per_min - 1.0 for run, other in zip(runs, base, strict=True)])
    lost = f", {broken} violations" if broken else ""
    return f"{speed:.3f}, {gain.value:+.1%} ± {gain.error:.1%}, age {age:.2f}{lost}"


def names(value: str, allowed: Sequence[str]) -> list[str]:
    """Return the names in a list with commas; "" means all."""
    chosen = [name.strip() for name in value.split(",") if name.strip()]
    for name in chosen:
        if name not in allowed:
            raise click.BadParameter(f"{name!r} is none of {', '.join(allowed)}")
    return chosen or list(allowed)


@click.command()
@click.option("--parts", default="", help=f"Any of {', '.join(PARTS)}; all by default.")
@click.option("--shapes", default="", help=f"Any of {', '.join(SHAPES)}; all in which a part can differ by default.")
@click.option("--steps", default=40, show_default=True, type=click.IntRange(min=8))
@click.option("--seeds", default=2, show_default=True, type=click.IntRange(min=1))
def main(parts: str, shapes: str, steps: int, seeds: int) -> None:
    """Run and print; each row appears as soon as it is complete."""
    for part in names(parts, [*PARTS]):
        chosen = [name for name in names(shapes, [*SHAPES]) if name in OF[part]]
        click.echo(f"\n| {part} | {' | '.join(chosen)} |\n|{' --- |' * (len(chosen) + 1)}")
        base: dict[str, list[Result]] = {}
        for variant in tracked(part, PARTS[part]):
            cells: list[str] = []
            for name in chosen:
                runs = results(part, variant, name, seeds=seeds, steps=steps)
                cells.append(cell(runs, base.setdefault(name, runs)))
            click.echo(f"| {variant} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
