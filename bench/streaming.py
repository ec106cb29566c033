"""Measure the gain from training on groups as they arrive: ``configs/streaming.toml`` with and without streaming.

The switch is ``trainer.streaming``. For each bound the trainer's step takes as long as the rollout of a step by itself,
which is first simulated with a trainer that takes no time. Then both ways run in virtual time (means of seeds) and,
with all their processes and simulated engines, in real time, one after the other. Exit 1 when a target is missed.

``--model`` measures a real engine and trainer instead: SmolLM2-135M-Instruct with LoRA answers sums in its own words,
with one core for the engine and one for the trainer. It needs the extras ``smollm2``, ``reasoning-gym`` and ``lora``,
and an idle machine.

    python -m bench.streaming [KEY=VALUE]... [--seeds N] [--virtual | --model] [--markdown]
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.progress import tracked
from bench.skewed import real
from staleflow.configs.loading.load import load
from staleflow.sim.simulate import simulate

CONFIGS = Path(__file__).parent.parent / "configs"
CONFIG = CONFIGS / "streaming.toml"
MODEL = (
    *("model.options={}", "prompts.chat_template=true", "prompts.options.template={question}", "model.lora.rank=16"),
    *("rollout.max_new_tokens=64", "rollout.max_inflight=16", "rollout.group_size=4", "rollout.filter=none"),
    *("trainer.steps=12", "trainer.checkpoint_every=1000", "trainer.eval_prompts=0", "trainer.lr=1e-4"),
    *("rollout.threads=1", "trainer.threads=1"),
)
"""Settings of ``configs/smollm2.toml``: a model that ends its answers itself, in two rounds of 16 samples a step."""
BOUNDS = (0, 1)
TARGET = 1.25
"""Steps a minute, as a multiple of those without streaming."""
NO_TIME_S = 1e-4
TITLES = ("η", "time", "rollout = train step, s", "batch by batch, steps/min", "streamed", "÷", f"≥ {TARGET}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bound, in one kind of time."""

    max_staleness: int
    time: str
    step_s: float
    whole: float
    """Steps a minute."""
    streamed: float

    @property
    def gain(self) -> float:
        return self.streamed / self.whole

    def cells(self) -> tuple[str, ...]:
        met = "yes" if self.gain >= TARGET else "no"
        speeds = (f"{self.whole:.1f}", f"{self.streamed:.1f}", f"{self.gain:.2f}")
        return (str(self.max_staleness), self.time, f"{self.step_s:.2f}", *speeds, met)


def rollout_s(overrides: Sequence[str], seeds: int) -> float:
    """Seconds of a step when the trainer takes none."""
    return 60.0 / virtual((*overrides, f"trainer.simulated_step_s={NO_TIME_S}", "trainer.streaming=false"), seeds)


def virtual(overrides: Sequence[str], seeds: int) -> float:
    """Steps a minute, mean of the seeds."""
    return statistics.fmean(simulate(load(CONFIG, (*overrides, f"seed={seed}"))).steps_per_min for seed in range(seeds))


def wall(overrides: Sequence[str], max_staleness: int) -> float:
    """Steps a minute of one real run."""
    return real(CONFIG, overrides, max_staleness).steps_per_min


def rows(overrides: Sequence[str], seeds: int, *, real_time: bool) -> list[Row]:
    """Measure every bound in virtual time, then in real time."""
    result: list[Row] = []
    for eta in tracked("bounds", BOUNDS):
        bound = (*overrides, f"staleness.max_staleness={eta}")
        step_s = rollout_s(bound, seeds)
        step = (*bound, f"trainer.simulated_step_s={step_s:.4f}")
        both = [(*step, f"trainer.streaming={on}") for on in ("false", "true")]
        whole, streamed = (virtual(one, seeds) for one in both)
        result.append(Row(max_staleness=eta, time="virtual", step_s=step_s, whole=whole, streamed=streamed))
        if real_time:
            whole, streamed = (wall(one, eta) for one in both)
            result.append(Row(max_staleness=eta, time="real", step_s=step_s, whole=whole, streamed=streamed))
    return result


def model_rows(overrides: Sequence[str], seeds: int) -> list[Row]:
    """Measure every bound with a real model. ``step_s`` is that of the trainer, batch by batch."""
    result: list[Row] = []
    for eta, seed in tracked("runs", [(eta, seed) for eta in BOUNDS for seed in range(seeds)]):
        bound = (*MODEL, *overrides, f"staleness.max_staleness={eta}", f"seed={seed}")
        whole, streamed = (
            real(CONFIGS / "smollm2.toml", (*bound, *way), eta)
            for way in ((), ("trainer.streaming=true", "trainer.stream_groups=2"))
        )
        speeds = {"whole": whole.steps_per_min, "streamed": streamed.steps_per_min}
        result.append(Row(max_staleness=eta, time="SmolLM2", step_s=whole.train_s, **speeds))
    return result


@click.command(help=__doc__)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--seeds", default=5, show_default=True, help="Simulations of each row.")
@click.option("--virtual", "virtual_only", is_flag=True, help="No real runs, which take three minutes.")
@click.option("--model", is_flag=True, help="A real engine and trainer; one run for each seed.")
@click.option("--markdown", is_flag=True, help="For bench/results/.")
def main(overrides: tuple[str, ...], seeds: int, virtual_only: bool, model: bool, markdown: bool) -> None:
    if virtual_only and model:
        raise click.UsageError("--virtual and --model exclude each other")
    result = model_rows(overrides, seeds) if model else rows(overrides, seeds, real_time=not virtual_only)
    cells = [row.cells() for row in result]
    if markdown:
        click.echo("\n".join(f"| {' | '.join(row)} |" for row in (TITLES, ("---",) * len(TITLES), *cells)))
    else:
        table = Table(*TITLES)
        for row in cells:
            table.add_row(*row)
        Console().print(table)
    sys.exit(0 if all(row.gain >= TARGET for row in result) else 1)


if __name__ == "__main__":
    main()
