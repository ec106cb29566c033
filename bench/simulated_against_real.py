"""Compare real runs of the quickstart with their simulation, at several bounds of staleness.

    python -m bench.costs costs.toml
    python -m bench.simulated_against_real costs.toml [--steps 40] [KEY=VALUE]...

Each run has the real processes: servers, one rollout worker with the transformers engine, a reward worker, a torch
trainer. Rollout worker and trainer are pinned to a core each; servers, reward worker and all other work of the machine
share both cores. So the costs of the simulation are those that the run itself shows, waiting for cores included
(``bench.run_costs``); the cost file has the ratios between coefficients. The run also records the lengths that it
wrote. The simulation then has to find which part waits for which, and how long: steps a minute, staleness, idle time
of the trainer.

Exit 1 when steps a minute of a configuration differ by more than 10 %.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bench import recorded_lengths
from bench.costs import text
from bench.progress import tracked
from bench.role_times import Used, sampled
from bench.run_costs import Ran, costs_of, read_run, rescaled
from staleflow.configs.costs import Costs
from staleflow.configs.loading.cost_file import read_costs
from staleflow.configs.loading.load import load
from staleflow.configs.schema import Config
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
WITHIN = 0.1
SHAPES: dict[str, tuple[str, ...]] = {
    "synchronous": ("staleness.max_staleness=0",),
    "η = 1": ("staleness.max_staleness=1",),
    "η = 2": ("staleness.max_staleness=2",),
    "η = 2, token bound": ("staleness.max_staleness=2", "staleness.bound=token"),
}
BASE = (
    "reward.run=bench.recorded_lengths:reward",
    "rollout.workers=1",
    "rollout.filter=none",
    "trainer.eval_prompts=0",
)
CORES = {"rollout": 0, "train": 1}
"""Roles with a core of their own."""
PROMPT_TOKENS = 6
"""Such as ``47+38=``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A configuration, run and simulated."""

    name: str
    real: Ran
    real_speed: float
    simulated: Result
    load: float
    """Load average of the machine in the minute before the end of the run."""

    @property
    def differs(self) -> float:
        """Difference of the steps a minute, as a share."""
        return self.simulated.steps_per_min / self.real_speed - 1.0


def compared(name: str, base: Costs, overrides: Sequence[str], place: Path) -> Compared:
    """Run a configuration for real, then simulate it with the costs of that run."""
    config, lengths, run_dir = load(CONFIG, overrides), place / "lengths.jsonl", place / "run"
    command = [sys.executable, "-m", "staleflow.cli", "run", str(CONFIG), *overrides, "--run-dir", str(run_dir)]
    environment = os.environ | {recorded_lengths.VARIABLE: str(lengths)}
    cores = CORES if (os.cpu_count() or 1) > 1 else {}
    with subprocess.Popen([*command, "--json"], stdout=subprocess.DEVNULL, env=environment) as process:
        with sampled(process.pid, cores) as times:
            process.wait()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    load_average, ran = os.getloadavg()[0], read_run(run_dir, config, times)
    return Compared(
        name=name,
        real=ran,
        real_speed=60.0 * ran.steps / ran.seconds,
        simulated=simulated(ran, base, overrides, lengths, place),
        load=load_average,
    )


def simulated(ran: Ran, base: Costs, overrides: Sequence[str], lengths: Path, place: Path) -> Result:
    """Simulate twice: the first run shows how long a step takes engines and scheduler with the costs of ``base``."""

    def run(costs: Costs) -> Result:
        (place / "costs.toml").write_text(text(costs), encoding="utf-8")
        return simulate(simulation(overrides, lengths, place / "costs.toml"))

    (place / "costs.toml").write_text(text(base), encoding="utf-8")
    costs = costs_of(ran, base, simulation(overrides, lengths, place / "costs.toml"))
    return run(rescaled(costs, ran, run(costs)))


def simulation(overrides: Sequence[str], lengths: Path, costs: Path) -> Config:
    """Return the configuration of the simulation."""
    return load(
        CONFIG,
        (
            *overrides,
            "rollout.engine=simulated",
            "trainer.backend=simulated",
            "rollout.simulated.lengths=trace",
            f"rollout.simulated.trace={lengths}",
            "rollout.simulated.prompt_share=0.5",
            f"simulation.costs={costs}",
            f"simulation.prompt_tokens={PROMPT_TOKENS}",
        ),
    )


def row(one: Compared) -> str:
    """Return a line of the table."""
    real, result = one.real, one.simulated
    staleness = statistics.fmean(line.staleness_mean for line in real.rows)
    idle, engine = real.trainer_idle, 1.0 - real.engine_s / real.seconds
    cells = (
        one.name,
        f"{one.load:.1f}",
        f"{one.real_speed:.1f}",
        f"{result.steps_per_min:.1f}",
        f"{one.differs:+.1%}",
        f"{staleness:.2f} / {result.staleness_mean:.2f}",
        f"{idle:.1%} / {result.trainer_idle:.1%}",
        f"{engine:.1%} / {result.engine_idle:.1%}",
    )
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| | load | real steps/min | simulated | difference | staleness | trainer idle | engine idle |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|"
)


def charged(one: Compared) -> str:
    """Return a line with what the run showed to the simulation, in ms."""
    real = one.real
    seconds = (
        real.mean("time/train"),
        real.between_s,
        real.fetch_s,
        real.mean("time/publish_total"),
        real.mean("time/pull"),
        real.engine_s / real.steps,
        real.reward_s,
    )
    return f"| {' | '.join((one.name, *(f'{1000 * each:.0f}' for each in seconds)))} |"


CHARGED = (
    "| ms | train step | between steps | fetch a batch | publish | pull | engine, a step | reward, a group |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|"
)


def roles(one: Compared) -> str:
    """Return a line with the processor time of the roles for a step, and the slowdown by waiting for a core."""
    used = (one.real.used.get(role, Used(0.0, 0.0)) for role in ROLES)
    cells = (f"{1000 * of.cpu_s / one.real.steps:.0f} at {of.slowdown:.1f}" for of in used)
    return f"| {' | '.join((one.name, *cells))} |"


ROLES = ("scheduler", "trajectories", "parameters", "rollout", "stage", "train")
USED = f"| CPU ms a step, at slowdown | {' | '.join(ROLES)} |\n|---|{'---:|' * len(ROLES)}"


@click.command(help=__doc__)
@click.argument("costs", type=click.Path(exists=True, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--steps", default=40, show_default=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), multiple=True, default=list(SHAPES))
@click.option("--keep", type=click.Path(path_type=Path), help="Folder for the runs; deleted without it.")
def main(costs: Path, overrides: tuple[str, ...], steps: int, shape: tuple[str, ...], keep: Path | None) -> None:
    base, done = read_costs(costs), list[Compared]()
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        for name in tracked("configurations", shape):
            place = (keep or Path(folder)) / str(len(done))
            place.mkdir(parents=True)
            chosen = (*BASE, f"trainer.steps={steps}", *SHAPES[name], *overrides)
            done.append(compared(name, base, chosen, place))
            click.echo(row(done[-1]), err=True)
    tables = ((HEAD, row), (CHARGED, charged), (USED, roles))
    click.echo("\n\n".join("\n".join((head, *map(line, done))) for head, line in tables))
    sys.exit(0 if all(abs(one.differs) <= WITHIN for one in done) else 1)


if __name__ == "__main__":
    main()
