"""Cost-effectiveness of cheap engines in another data centre, against engines of the trainer's kind (StreamRL, arXiv
2504.15930: up to 1.33 times).

Four H800 train. Rollout runs on H800 beside them, or on H20, beside them or behind a slow link, with full versions,
deltas or LoRA adapters. Of each kind, the number of engines is the one at which 1,000 trajectories cost least. The
synchronous, colocated baseline uses all its H800 for rollout, then for training. Prices are those of H20 hours.

    python -m bench.prices [--small] [--seed S]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from bench.prices_world import (
    DELTA,
    FULL,
    FULL_SIZE,
    H20,
    H800,
    LORA,
    MAX_STALENESS,
    SMALL_SIZE,
    TRAINER_GPUS,
    Gpu,
    Size,
    Transfer,
    config,
    costs,
    costs_file,
)
from bench.progress import tracked
from staleflow.sim.peers.run import simulate_peer
from staleflow.sim.simulate import simulate

RATIOS = (2.0, 2.85, 4.0)
"""Prices of an H800 in those of an H20, to choose from: list prices differ by provider and year."""
LOCAL_GBIT = 1e6
"""A link that takes no time."""
LINKS_GBIT = (10.0, 1.0)
COUNTS = {H800.name: (3, 4, 6), H20.name: (4, 6, 8, 10)}
COLOCATED = (4, 8)
HEAD = ("rollout", "link", "weights", "steps/min", "of the trainer's limit", "staleness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines of one kind, where they are, and how they get weights. ``trains``: they are the trainer's GPUs, too."""

    gpu: Gpu
    count: int
    gbit: float = LOCAL_GBIT
    transfer: Transfer = FULL
    trains: bool = False

    @property
    def remote(self) -> bool:
        return self.gbit < LOCAL_GBIT

    def price(self, ratio: float) -> float:
        """Return the price of engines and trainer for an hour, in prices of an H20."""
        trainer = 0 if self.trains else TRAINER_GPUS * ratio
        return trainer + self.count * (ratio if self.gpu is H800 else 1.0)

    def __str__(self) -> str:
        return f"{self.count} {self.gpu.name.upper()}{', colocated, synchronous' if self.trains else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One simulated fleet."""

    fleet: Fleet
    steps_per_min: float
    of_limit: float
    staleness: float

    def cost(self, ratio: float) -> float:
        """Return the cost of a step."""
        return self.fleet.price(ratio) / 60.0 / self.steps_per_min

    def cells(self) -> tuple[str, ...]:
        fleet = self.fleet
        link = f"{fleet.gbit:g} Gbit/s" if fleet.remote else "-"
        speed, share = f"{self.steps_per_min:.3f}", f"{self.of_limit:.0%}"
        return str(fleet), link, fleet.transfer.name if fleet.remote else "-", speed, share, f"{self.staleness:.2f}"


def measure(fleet: Fleet, size: Size, seed: int = 0) -> Row:
    """Simulate one fleet."""
    gpus = fleet.count if fleet.trains else TRAINER_GPUS
    with costs_file(costs(fleet.transfer, fleet.gbit, gpus)) as file:
        engines = [fleet.gpu.fleet(fleet.count, 1.0, remote=fleet.remote)]
        eta = 0 if fleet.trains else MAX_STALENESS
        given = config(size, engines, file, trainer_price=0.0, seed=seed, max_staleness=eta)
        result = simulate_peer("sync", given) if fleet.trains else simulate(given)
    return Row(
        fleet=fleet,
        steps_per_min=result.steps_per_min,
        of_limit=result.steps_per_min / result.trainer_limit,
        staleness=result.staleness_mean,
    )


def cheapest(rows: Sequence[Row], ratio: float) -> Row:
    """Return the fleet at which a step costs least."""
    return min(rows, key=lambda row: row.cost(ratio))


def rows(size: Size, seed: int = 0) -> Iterator[Row]:
    """Measure every fleet: the numbers of engines first, then the best number of H20 behind each link."""
    fleets = [Fleet(gpu=H800, count=count, trains=True) for count in COLOCATED]
    fleets += [Fleet(gpu=gpu, count=count) for gpu in (H800, H20) for count in COUNTS[gpu.name]]
    local: list[Row] = []
    for fleet in tracked("fleets", fleets):
        local.append(measure(fleet, size, seed))
        yield local[-1]
    best = cheapest([row for row in local if row.fleet.gpu is H20], RATIOS[1]).fleet.count
    far = [
        Fleet(gpu=H20, count=best, gbit=gbit, transfer=transfer)
        for transfer in (FULL, DELTA, LORA)
        for gbit in LINKS_GBIT
    ]
    yield from (measure(fleet, size, seed) for fleet in tracked("links", far))


def comparison(measured: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the table of cost-effectiveness: trajectories for the money, as multiples of both baselines."""
    yield ("rollout", "link", "weights", *(f"H800 = {ratio:g} H20" for ratio in RATIOS))
    ways = dict.fromkeys((row.fleet.gpu, row.fleet.gbit, row.fleet.transfer, row.fleet.trains) for row in measured)
    for way in ways:
        alike = [r for r in measured if (r.fleet.gpu, r.fleet.gbit, r.fleet.transfer, r.fleet.trains) == way]
        cells = [_effect(alike, measured, ratio) for ratio in RATIOS]
        gpu, gbit, transfer, trains = way
        far = gbit < LOCAL_GBIT
        name = f"{gpu.name.upper()}{', colocated, synchronous' if trains else ''}"
        yield name, f"{gbit:g} Gbit/s" if far else "-", transfer.name if far else "-", *cells


def _effect(alike: Sequence[Row], measured: Sequence[Row], ratio: float) -> str:
    row = cheapest(alike, ratio)
    own = cheapest([r for r in measured if r.fleet.gpu is H800 and not r.fleet.trains], ratio)
    colocated = cheapest([r for r in measured if r.fleet.trains], ratio)
    against = (base.cost(ratio) / row.cost(ratio) for base in (own, colocated))
    return f"{' / '.join(f'{factor:.2f}' for factor in against)} ({row.fleet.count})"


def line(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


@click.command()
@click.option("--small", is_flag=True, help="Short runs, in seconds; their numbers mean nothing.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
def main(small: bool, seed: int) -> None:
    """Measure and print two tables: speeds, and cost-effectiveness against H800 alone / against colocated H800."""
    size = SMALL_SIZE if small else FULL_SIZE
    measured: list[Row] = []
    click.echo(f"{line(HEAD)}\n{line(['---'] * len(HEAD))}")
    for row in rows(size, seed):
        measured.append(row)
        click.echo(line(row.cells()))
    head, *table = comparison(measured)
    click.echo(f"\n{line(head)}\n{line(['---'] * len(head))}")
    for cells in table:
        click.echo(line(cells))


if __name__ == "__main__":
    main()
