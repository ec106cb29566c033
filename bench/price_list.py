"""The price list of a bound: how much faster each choice is than a trainer that waits, and what it costs.

    python -m bench.price_list [--shapes long-tail,tail] [--max-staleness 2] [--steps 40] [--seeds 2]

Print one table for each workload, in virtual time, with the shipped scheduler and rollout worker. All choices keep the
bound. The prices: mean length of the trained trajectories relative to the generated ones (length bias), share of the
generated tokens that is discarded, share of the trained tokens that is too old and masked, and share of the trained
tokens in trajectories that were cut, which ``trainer.mask_truncated`` would mask.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

import click

from bench.coordination_table import Mean
from bench.dispatch_shapes import SHAPES, shape
from bench.progress import tracked
from staleflow.configs.schema import Config
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate

TOKEN, SPARES = "staleness.bound=token", "rollout.redundancy.groups=1.25"
HALVED = "`max_new_tokens` halved"
CHOICES: dict[str, tuple[str, ...]] = {
    "`wait` (default)": (),
    '`composition = "length_clustered"`': (
        "coordination.composition=length_clustered",
        "coordination.ranker=learned",
    ),
    "`redundancy.groups = 1.25`": (SPARES,),
    "`redundancy.samples = 1.25`": ("rollout.redundancy.samples=1.25",),
    HALVED: (),
    '`on_overdue = "truncate"`': ("staleness.on_overdue=truncate",),
    '`on_overdue = "retry"`': ("staleness.on_overdue=retry",),
    '`on_overdue = "drop"`': ("staleness.on_overdue=drop",),
    '`bound = "token"`': (TOKEN,),
    '`bound = "token"`, `redundancy.groups = 1.25`': (TOKEN, SPARES),
}
"""Choices by name, as overrides of the workload."""


def share(of: Callable[[Result], float]) -> Callable[[Sequence[Result]], str]:
    """Return a column with the mean of a share; "0" if it is 0 in all runs."""
    return lambda runs: f"{mean:.1%}" if (mean := fmean(map(of, runs))) else "0"


COLUMNS: dict[str, Callable[[Sequence[Result]], str]] = {
    "staleness": lambda runs: f"{fmean(run.staleness_mean for run in runs):.2f}",
    "discarded": share(lambda run: run.discarded),
    "masked": share(lambda run: run.masked),
    "cut": share(lambda run: run.truncated),
}


def overrides(choice: str, config: Config) -> Sequence[str]:
    """Return the overrides of a choice for a workload."""
    if choice == HALVED:
        return (f"rollout.max_new_tokens={config.rollout.max_new_tokens // 2}",)
    return CHOICES[choice]


def row(choice: str, runs: Sequence[Result], base: Sequence[Result]) -> str:
    """Return the row of a choice; ``base``: the runs of ``wait`` with the same seeds."""
    speed = fmean(run.steps_per_min for run in runs)
    gain = Mean.of([run.steps_per_min / other.steps_per_min for run, other in zip(runs, base, strict=True)])
    broken = sum(run.violations for run in runs)
    assert not broken, f"{choice}: {broken} violations"
    bias = fmean(run.length_bias for run in runs)
    if choice == HALVED:  # no trajectory of the run is longer, so its own bias is 1
        bias *= fmean(fmean(run.drawn) for run in runs) / fmean(fmean(run.drawn) for run in base)
    own = (choice, f"{speed:.2f}", f"{gain.value:.2f} ± {gain.error:.2f}", f"{bias:.2f}")
    cells = [*own, *(of(runs) for of in COLUMNS.values())]
    return f"| {' | '.join(cells)} |"


@click.command()
@click.option("--shapes", default="long-tail,tail", show_default=True, help=f"Any of {', '.join(SHAPES)}.")
@click.option("--max-staleness", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--steps", default=40, show_default=True, type=click.IntRange(min=8))
@click.option("--seeds", default=2, show_default=True, type=click.IntRange(min=1))
def main(shapes: str, max_staleness: int, steps: int, seeds: int) -> None:
    """Run and print; each row appears as soon as it is complete."""
    common = (f"staleness.max_staleness={max_staleness}",)
    for name in shapes.split(","):
        if name not in SHAPES:
            raise click.BadParameter(f"--shapes: {name!r} is none of {', '.join(SHAPES)}")
        head = ("choice", "steps/min", "of `wait`", "length bias", *COLUMNS)
        click.echo(f"\n{name}:\n\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
        base: list[Result] = []
        for choice in tracked(name, CHOICES):
            chosen = overrides(choice, shape(name, *common, seed=0, steps=steps))
            runs = [simulate(shape(name, *common, *chosen, seed=seed, steps=steps)) for seed in range(seeds)]
            base = base or runs
            click.echo(row(choice, runs, base))


if __name__ == "__main__":
    main()
