"""Compare real runs of the quickstart with their simulation from a cost file: steps a minute, and what takes the time.

    python -m bench.costs costs.toml
    python -m bench.simulated_against_real costs.toml [--steps 24] [KEY=VALUE]...

The simulation gets the costs of the file and, of the real run, only the lengths of its trajectories. It has no limit of
cores: the machine must have one for each engine and one for the trainer, and no other work. The model is not warmed up,
which changes no duration. Exit 1 when steps a minute of a configuration differ by more than 10 %.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import click

from bench.skewed import Seen, read
from staleflow.configs.loading.load import load
from staleflow.sim.measured import measure
from staleflow.sim.simulate import TRACE, simulate

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
WITHIN = 0.1
SHAPES: dict[str, tuple[str, ...]] = {
    "synchronous": ("staleness.max_staleness=0",),
    "η = 1": ("staleness.max_staleness=1",),
    "η = 2": ("staleness.max_staleness=2",),
    "token bound, η = 2": ("staleness.max_staleness=2", "staleness.bound=token"),
}
BASE = ("rollout.workers=1", "rollout.filter=none", "trainer.eval_prompts=0", "model.options.steps=20")
WEIGHTS_GIB = 0.56e6 * 4 / (1 << 30)


def compared(costs: Path, overrides: tuple[str, ...]) -> tuple[Seen, Seen]:
    """Return what a real run and its simulation show."""
    config = load(CONFIG, overrides)
    with tempfile.TemporaryDirectory(prefix="sf-") as place:
        run_dir, lengths = Path(place, "run"), Path(place, "lengths.jsonl")
        command = [sys.executable, "-m", "staleflow.cli", "run", str(CONFIG), *overrides, "--run-dir", str(run_dir)]
        subprocess.run([*command, "--json"], stdout=subprocess.DEVNULL, check=True)
        trace = run_dir / TRACE
        lengths.write_text("".join(f'{{"tokens": {tokens}}}\n' for tokens in measure(trace).lengths))
        simulated = load(
            CONFIG,
            (
                *overrides,
                "rollout.engine=simulated",
                "trainer.backend=simulated",
                "rollout.simulated.lengths=trace",
                f"rollout.simulated.trace={lengths}",
                f"simulation.costs={costs}",
                f"simulation.model_gib={WEIGHTS_GIB!r}",
                "simulation.prompt_tokens=7",
            ),
        )
        simulate(simulated, run_dir=Path(place, "simulated"))
        bound = config.staleness.max_staleness
        return read(trace, bound), read(Path(place, "simulated", TRACE), bound)


@click.command(help=__doc__)
@click.argument("costs", type=click.Path(exists=True, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--steps", default=24, show_default=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), multiple=True, default=list(SHAPES))
def main(costs: Path, overrides: tuple[str, ...], steps: int, shape: tuple[str, ...]) -> None:
    click.echo("| | real steps/min | simulated | difference | train step, s | group, s | version to an engine, s |")
    click.echo("|---|---:|---:|---:|---:|---:|---:|")
    agrees = True
    for name in shape:
        real, simulated = compared(costs.resolve(), (*BASE, f"trainer.steps={steps}", *SHAPES[name], *overrides))
        differs = simulated.steps_per_min / real.steps_per_min - 1.0
        agrees = agrees and abs(differs) <= WITHIN
        pairs = (
            (real.train_s, simulated.train_s),
            (real.group_s, simulated.group_s),
            (real.pull_s, simulated.pull_s),
        )
        cells = (f"{one:.3f} / {other:.3f}" for one, other in pairs)
        speeds = f"{real.steps_per_min:.1f} | {simulated.steps_per_min:.1f} | {differs:+.1%}"
        click.echo(f"| {name} | {speeds} | {' | '.join(cells)} |")
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    main()
