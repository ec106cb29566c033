"""Measure train steps: a hand-written torch loop, TRL's GRPOTrainer and the shipped trainer, on the same batches.

Each way runs in a process of its own, in turns, on random trajectories of equal shapes: one optimizer step on all of
them, GRPO advantages, the clipped loss. A step's time excludes the data. *share of matmul* is 6 FLOPs a parameter and
token over the speed of a large matrix product in the same process. On a machine that does other work, compare the CPU
seconds, which exclude waiting for a core. Peak memory is what a step needs above what the process holds between steps.
Needs the extra ``trl``.

    python -m bench.trainer [--model DIRECTORY] [--shape NAME] [--threads N] [--rounds N] [--markdown]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from bench.progress import tracked
from bench.trainer_data import SHAPES

OURS: Final[Mapping[str, tuple[str, ...]]] = {
    "staleflow, padded": ("share_prompts=false",),
    "staleflow, packed": ("packing=true", "share_prompts=false"),
    "staleflow, default": (),
}
"""Settings of the shipped trainer."""
WAYS: Final = ("torch", "TRL", *OURS)
TITLES: Final = ("way", "s a step", "÷ torch", "CPU s", "÷ torch", "tokens/s", "share of matmul", "peak MiB of a step")


def measured(way: str, model: Path, shape: str, *, threads: int, steps: int) -> dict[str, float]:
    """Run one way in a process of its own."""
    words = [way, str(model), shape, str(threads), str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-m", "bench.trainer_ways", *words]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if completed.returncode:
        raise click.ClickException(f"{way} failed:\n{completed.stderr[-3000:]}")
    values: dict[str, float] = json.loads(completed.stdout.rpartition("{")[1] + completed.stdout.rpartition("{")[2])
    return values


def rows(results: Mapping[str, Sequence[Mapping[str, float]]]) -> list[tuple[str, ...]]:
    """Format the medians over the rounds."""

    def median(way: str, name: str) -> float:
        return statistics.median(one[name] for one in results[way])

    base, cpu = median("torch", "seconds"), median("torch", "cpu_seconds")
    return [
        (
            way,
            f"{median(way, 'seconds'):.3f}",
            f"{base / median(way, 'seconds'):.2f}",
            f"{median(way, 'cpu_seconds'):.3f}",
            f"{cpu / median(way, 'cpu_seconds'):.2f}",
            f"{median(way, 'tokens') / median(way, 'seconds'):,.0f}",
            f"{median(way, 'matmul_share'):.2f}",
            f"{median(way, 'peak_mib'):,.0f}",
        )
        for way in results
    ]


def quickstart(folder: Path) -> Path:
    """Write the quickstart's model without its warm-up, which does not change the work of a step."""
    from staleflow.examples.quickstart.model import build

    build(folder, 0, steps=1)
    return folder


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path), help="Model directory; default: the quickstart's model.")
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="quickstart", show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Processes of each way.")
@click.option("--steps", default=5, show_default=True, help="Measured steps of each process, after one unmeasured.")
@click.option("--markdown", is_flag=True, help="For bench/results/.")
def main(model: Path | None, shape: str, threads: int, rounds: int, steps: int, markdown: bool) -> None:
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        directory = model or quickstart(Path(folder))
        for _, way in tracked("ways", [(turn, way) for turn in range(rounds) for way in WAYS], lambda item: item[1]):
            results[way].append(measured(way, directory, shape, threads=threads, steps=steps))
    cells = rows(results)
    if markdown:
        click.echo("\n".join(f"| {' | '.join(row)} |" for row in (TITLES, ("---",) * len(TITLES), *cells)))
        return
    table = Table(*TITLES)
    for row in cells:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
