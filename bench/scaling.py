"""Simulate 8 to 1,024 engines at the same work for each, with the measured costs of scheduler, trajectory servers and
wire, and without any.

    python -m bench.scaling                                      short and long answers, one shard
    python -m bench.scaling --costs costs.toml --engines 256,1024 --lengths short --shards 1,4

The scheduler and the rollout workers are the shipped ones, in virtual time; the costs are those of
``python -m bench.costs``. Every engine has 64 slots and four groups of eight in each batch. The trainer grows with the
engines: a step always takes half of the time in which the engines write a batch, so it is never the limit. The bound is
the token bound: under the trajectory bound, a larger batch waits for a longer group, which is unrelated to scale.
Weights cost nothing: publishing is the same for any number of engines, and the simulator has no model of relays.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bench.costs import text
from staleflow.configs.costs import Costs
from staleflow.configs.loading.cost_file import read_costs
from staleflow.configs.loading.load import load
from staleflow.configs.schema import Config
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate

CONFIG = Path(__file__).parent.parent / "configs" / "skewed.toml"
COSTS = Path(__file__).parent / "results" / "2026-11-2-cores-costs.toml"
ENGINES = (8, 64, 256, 512, 1024)
GROUPS = 4
"""Groups of each engine in a batch."""
STEPS, MAX_STALENESS = 6, 2
SEEDED_ENGINES = 128
"""Fleets below this size run several seeds, which together have as many engines."""
TRAIN_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Answers:
    """Lengths, lognormal with sigma 1.0."""

    mean_tokens: float
    """The cap is eight times this."""
    step_s: float
    """Seconds of a decode step."""


ANSWERS = {"short": Answers(165.0, 0.006), "long": Answers(2000.0, 0.0124)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Simulations of one size, one for each seed."""

    answers: str
    engines: int
    shards: int
    charged: Sequence[Result]
    free: Sequence[Result]
    """Without costs; empty if that was not simulated."""
    cpu_s: float
    """CPU seconds of a simulation with costs."""

    @property
    def groups_per_min(self) -> float:
        """Groups a minute of each engine."""
        return GROUPS * _mean(self.charged, lambda result: result.steps_per_min)

    @property
    def free_groups_per_min(self) -> float:
        """The same without costs."""
        return GROUPS * _mean(self.free, lambda result: result.steps_per_min)


def config_of(answers: Answers, engines: int, shards: int, costs: Path, steps: int, seed: int) -> Config:
    """Return the configuration of a fleet."""
    rollout = load(CONFIG).rollout
    slots = rollout.max_inflight
    token_s = (answers.step_s + slots * rollout.simulated.k3) / slots
    write_s = GROUPS * rollout.group_size * answers.mean_tokens * token_s
    return load(
        CONFIG,
        (
            f"seed={seed}",
            f"rollout.workers={engines}",
            f"rollout.max_new_tokens={round(8 * answers.mean_tokens)}",
            f"rollout.simulated.mean_tokens={answers.mean_tokens}",
            f"rollout.simulated.k2={answers.step_s}",
            f"trajectories.shards={shards}",
            f"trainer.batch_size={GROUPS * engines}",
            f"trainer.steps={steps}",
            f"trainer.simulated_step_s={TRAIN_SHARE * write_s!r}",
            f"staleness.max_staleness={MAX_STALENESS}",
            "staleness.bound=token",
            f"simulation.costs={costs}",
        ),
    )


def coordination(costs: Costs) -> Costs:
    """Return only the costs that depend on the number of engines."""
    return Costs(source=costs.source, scheduler=costs.scheduler, shard=costs.shard, wire=costs.wire)


def fleet(answers: str, engines: int, shards: int, costs: Costs, *, steps: int, seeds: int, free: bool) -> Fleet:
    """Simulate a fleet, with costs and (``free``) without."""
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:

        def run(charged: Costs) -> list[Result]:
            file = Path(folder) / "costs.toml"
            file.write_text(text(charged), encoding="utf-8")
            configs = [config_of(ANSWERS[answers], engines, shards, file, steps, seed) for seed in range(seeds)]
            return [simulate(config) for config in configs]

        began_s = time.process_time()
        charged = run(coordination(costs))
        cpu_s = (time.process_time() - began_s) / seeds
        plain = run(Costs()) if free else []
    return Fleet(answers=answers, engines=engines, shards=shards, charged=charged, free=plain, cpu_s=cpu_s)


HEAD = (
    "| answers | shards | engines | steps/min | groups/min an engine | without costs | share of that | scheduler | "
    "busiest shard | busiest connection | CPU seconds |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def line(one: Fleet) -> str:
    """Return a line of the table."""
    free = one.free_groups_per_min if one.free else 0.0
    cells = (
        one.answers,
        f"{one.shards}",
        f"{one.engines:,}",
        f"{one.groups_per_min / GROUPS:.2f}",
        f"{one.groups_per_min:.1f}",
        f"{free:.1f}" if free else "",
        f"{one.groups_per_min / free:.3f}" if free else "",
        f"{_mean(one.charged, lambda result: result.scheduler_busy):.1%}",
        f"{_mean(one.charged, lambda result: result.shard_busy):.1%}",
        f"{_mean(one.charged, lambda result: result.wire_busy):.1%}",
        f"{one.cpu_s:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def _mean(results: Sequence[Result], value: Callable[[Result], float]) -> float:
    return statistics.fmean(value(result) for result in results)


def _numbers(_: click.Context, __: click.Parameter, value: str) -> list[int]:
    try:
        return [int(one) for one in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{value!r}; allowed are whole numbers, separated by commas") from error


@click.command(help=__doc__)
@click.option("--costs", default=COSTS, show_default="bench/results", type=click.Path(exists=True, path_type=Path))
@click.option("--engines", default=",".join(map(str, ENGINES)), show_default=True, callback=_numbers)
@click.option("--shards", default="1", show_default=True, callback=_numbers)
@click.option("--lengths", type=click.Choice(list(ANSWERS)), multiple=True, default=list(ANSWERS))
@click.option("--steps", default=STEPS, show_default=True)
@click.option("--free/--no-free", default=True, show_default=True, help="Also simulate without costs.")
def main(
    costs: Path,
    engines: list[int],
    shards: list[int],
    lengths: tuple[str, ...],
    steps: int,
    free: bool,
) -> None:
    charged = coordination(read_costs(costs))
    click.echo(HEAD)
    for answers in lengths:
        for count in shards:
            for number in engines:
                seeds = max(SEEDED_ENGINES // number, 1)
                click.echo(line(fleet(answers, number, count, charged, steps=steps, seeds=seeds, free=free)))


if __name__ == "__main__":
    main()
