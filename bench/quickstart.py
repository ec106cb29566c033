"""Measure whether the quickstart learns: run it once per seed, as a user would, and print the numbers of its summaries.

The goal: mean reward on held-out prompts from at most 0.5 to at least 0.85 within 6 minutes on 2 cores, every seed,
with no violation of the bound in a trace that is audited after the run. Exit 1 when a seed misses it.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import click
import msgspec
from rich.console import Console
from rich.table import Table

from bench.progress import tracked
from staleflow.supervisor.summary import Summary

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
START, END, WALL_S = 0.5, 0.85, 360.0


def run(seed: int, overrides: Sequence[str], run_dir: Path) -> Summary:
    """Run the quickstart once. Its view goes to the terminal's error stream; return its summary."""
    command = [
        sys.executable,
        "-m",
        "staleflow.cli",
        "run",
        str(CONFIG),
        f"seed={seed}",
        *overrides,
        "--run-dir",
        str(run_dir),
        "--json",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        sys.exit(done.returncode)  # the run has printed the reason
    return msgspec.json.decode(done.stdout, type=Summary)


def evaluations(run_dir: Path) -> dict[int, float]:
    """Step -> mean reward on held-out prompts."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {int(values["step"]): values["reward/eval"] for values in lines if "reward/eval" in values}


def reached(run_dir: Path) -> int | None:
    """The first step whose evaluation reached the goal."""
    return next((step for step, reward in evaluations(run_dir).items() if reward >= END), None)


def good(summary: Summary) -> bool:
    start, end = summary.reward_start, summary.reward_end
    return (
        summary.good
        and start is not None
        and end is not None
        and start <= START
        and end >= END
        and summary.wall_s <= WALL_S
    )


@click.command(help=__doc__)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--runs", type=click.Path(path_type=Path), help="Keep the run directories here.")
@click.option("--markdown", is_flag=True, help="For bench/results/.")
def main(overrides: tuple[str, ...], seeds: int, runs: Path | None, markdown: bool) -> None:
    folder = runs or Path(tempfile.mkdtemp(prefix="sf-"))
    titles: tuple[str, ...] = (
        "seed",
        "steps",
        "reward at start",
        "at end",
        "mean",
        f"{END:g} at step",
        "off-policy mean",
        "max",
        "bound",
    )
    titles += ("violations", "tokens/s", "wall s", "goal")
    rows: list[tuple[str, ...]] = []
    passed: list[bool] = []
    for seed in tracked("runs", range(seeds), "seed {}".format):
        summary = run(seed, overrides, folder / f"seed-{seed}")
        passed.append(good(summary))
        rows.append(
            (
                str(seed),
                str(summary.steps),
                f"{summary.reward_start:.3f}",
                f"{summary.reward_end:.3f}",
                f"{fmean(evaluations(folder / f'seed-{seed}').values()):.3f}",
                f"{reached(folder / f'seed-{seed}')}",
                f"{summary.off_policy_mean:.2f}",
                str(summary.off_policy_max),
                str(summary.max_staleness),
                str(summary.violations),
                f"{summary.tokens_per_s:.0f}",
                f"{summary.wall_s:.0f}",
                "yes" if passed[-1] else "NO",
            )
        )
    show(titles, rows, markdown)
    sys.exit(0 if all(passed) else 1)


def show(titles: tuple[str, ...], rows: list[tuple[str, ...]], markdown: bool) -> None:
    if markdown:
        for row in (titles, ("---",) * len(titles), *rows):
            click.echo("| " + " | ".join(row) + " |")
        return
    table = Table(*titles, title="quickstart, one run a seed")
    for row in rows:
        table.add_row(*row)
    Console(width=max(Console().width, 110)).print(table)


if __name__ == "__main__":
    main()
