"""The targets of coordination: speed and freshness of the shipped strategies, beside peers and theoretical limits.

Print one table per row of targets, in virtual time, with the shipped scheduler: the run, its target, the result, the
bound that applies to the very lengths that were drawn, and whether the target is met. The targets were set with a
simulator that publishes a version when its step begins, so they are judged in the same way (``--publish start``). The
results of the same runs with versions published after their step, as in reality, are printed after it.

    python -m bench.coordination [--rows token,trajectory] [--publish start|end|both] [--cost moe] [--workers 2]
    python -m bench.coordination --small            what CI runs: a smaller world, in seconds
    python -m bench.coordination --report           also writes bench/results/YYYY-MM-N-cores-coordination.md
"""

import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from bench.coordination_fleet import engines
from bench.coordination_rows import Bench
from bench.coordination_table import Line, Table
from bench.coordination_world import COSTS, DISPATCH, FILL, FULL, MU, SMALL, Publish, Runs, Size
from bench.ledger_model import HISTORY, compare
from bench.progress import tracked

ROWS = ("ledger", "token", "trajectory", "clustered", "asynchronous", "staleness", "engines")
RESULTS = Path(__file__).parent / "results"


def ledger(events: int) -> Table:
    """Run the ledger and the paper's buffers event by event; ``AssertionError`` at the first difference."""
    done: Counter[str] = Counter()
    histories = 0
    while (left := events - done.total()) > 0:
        done += compare(histories, min(HISTORY, left))
        histories += 1
    line = Line(
        what=f"{done.total():,} random events",
        target="identical admissions, batches, readiness",
        measured=f"no difference in {histories:,} histories",
        met=True,
        values={"events": done.total()},
    )
    return Table(title="The ledger beside the paper's versioned buffers", lines=[line])


def tables(rows: Sequence[str], size: Size, cost: str, publishes: Sequence[Publish], workers: int) -> Iterator[Table]:
    """The requested rows in order, one moment of publication after the other."""
    runs = Runs(workers)
    if "ledger" in rows:
        yield ledger(size.events)
    for publish in publishes:
        bench = Bench(runs, size, cost, publish)
        of: dict[str, Callable[[], Table]] = {
            "token": bench.token,
            "trajectory": bench.trajectory,
            "clustered": bench.clustered,
            "asynchronous": bench.asynchronous,
            "staleness": bench.staleness,
            "engines": partial(engines, size, cost, publish),
        }
        for name in tracked("tables", [name for name in rows if name in of]):
            yield of[name]()


def heading(size: Size, cost: str, seconds: float) -> str:
    """Hardware, date, command and world, as in the files of results."""
    cores, today = os.cpu_count(), time.strftime("%Y-%m-%d")
    command = " ".join(["python -m bench.coordination", *sys.argv[1:]])
    return (
        f"# Coordination, {cores} cores, Python {platform.python_version()}, {today}\n\n"
        f"`{command}`, {seconds:.0f} s. All times but those of decide() are virtual; ± is the standard error over "
        f'{size.seeds} seeds. Where nothing else is said: {size.engines} engines of cost "{cost}", lognormal lengths '
        f"(sigma 0.9, median {size.scale * math.exp(MU):.0f}, at most {size.scale * 16_384:.0f} tokens), {size.batch} "
        f"groups a batch, a trainer of {size.train_s:g} s a step, {size.steps} steps. Just in time: "
        f"`{'` `'.join(DISPATCH)}`; fill: `{'` `'.join(FILL)}`.\n\n"
    )


def _rows(_: click.Context, __: click.Parameter, value: str) -> list[str]:
    chosen = [part.strip() for part in value.split(",") if part.strip()]
    for name in chosen:
        if name not in ROWS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(ROWS)}")
    return chosen


@click.command()
@click.option("--small", is_flag=True, help="A smaller world, in seconds.")
@click.option("--rows", default=",".join(ROWS), show_default=True, callback=_rows)
@click.option("--publish", default="both", show_default=True, type=click.Choice(["start", "end", "both"]))
@click.option("--cost", default="flat", show_default=True, type=click.Choice(list(COSTS)))
@click.option("--seeds", type=click.IntRange(min=1), help="Instead of the size's own number.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(min=1), help="Runs at once, a core each.")
@click.option("--report", is_flag=True, help="Write the tables into bench/results.")
def main(small: bool, rows: list[str], publish: str, cost: str, seeds: int | None, workers: int, report: bool) -> None:
    """Run and print; each table appears as soon as it is complete."""
    started = time.perf_counter()
    size = SMALL if small else FULL
    size = replace(size, seeds=seeds or size.seeds)
    publishes: list[Publish] = ["start", "end"] if publish == "both" else ["start" if publish == "start" else "end"]
    parts: list[str] = []
    for table in tables(rows, size, cost, publishes, workers):
        parts.append(table.markdown())
        click.echo(parts[-1] + "\n")
    if report:
        text = heading(size, cost, time.perf_counter() - started) + "\n\n".join(parts) + "\n"
        path = RESULTS / f"{time.strftime('%Y-%m')}-{os.cpu_count()}-cores-coordination.md"
        path.write_text(text)
        click.echo(f"written to {path}", err=True)


if __name__ == "__main__":
    main()
