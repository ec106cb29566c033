"""Measure the effect of staleness on learning, and the remedy that each correction offers.

Three small tasks and a real model, several seeds, equal samples: synchronous (max_staleness 0) beside each
``max_staleness``, correction and bound. Each run is the shipped ledger, engine and train step in one thread
(``learning_run``), with a window that is always full, so that after the first steps every batch is as old as the bound
allows. Finished runs are lines of ``--rows`` and are not repeated, so that the whole grid can be stopped and continued.

    python bench/learning.py [--tasks complement,rotate,sort] [--lrs 5e-4] [--seeds 0,1,2] [--etas 1,2,4,8]
    python bench/learning.py --tasks smollm2 --lrs 2e-5 --steps 16 --groups 4 --every 4 --etas 2,8 --bounds trajectory
    python bench/learning.py --report-only          tables and plots of the finished runs
"""

import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from bench.learning_plot import plots
from bench.learning_report import CORRECTIONS, Run, tables

RUNS = Path(__file__).parent.parent / "runs" / "learning"
TASKS = ("complement", "rotate", "sort")
ETAS = (1, 2, 4, 8)
BOUNDS = ("trajectory", "token")
GROUPS, SAMPLES, EVERY = 16, 8, 10
"""Groups a step, trajectories a group, steps between evaluations."""
DECODE_STEPS = 2
"""Token bound: number of tokens that every running trajectory gets between two train steps."""


def grid(
    tasks: Sequence[str], seeds: Sequence[int], etas: Sequence[int], corrections: Sequence[str], bounds: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Runs of the grid: the synchronous run of each task and seed first, then all seeds of one choice."""
    for task, seed in itertools.product(tasks, seeds):
        yield {"task": task, "seed": seed, "eta": 0, "correction": "none", "bound": "trajectory"}
    for task, bound, eta, correction, seed in itertools.product(tasks, bounds, etas, corrections, seeds):
        if eta:
            yield {"task": task, "seed": seed, "eta": eta, "correction": correction, "bound": bound}


def one(key: dict[str, Any], cache: str, every: int) -> Run:
    """One run, from the task's model to its curve, in a process with one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from bench.learning_one import train  # the report runs without torch

    return train(key, Path(cache), every=every, decode_steps=DECODE_STEPS)


def read(rows: Path) -> list[Run]:
    """Finished runs, in the order in which they ended, without a last line that was cut off."""
    result: list[Run] = []
    for line in rows.read_text().splitlines() if rows.is_file() else ():
        try:
            result.append(json.loads(line))
        except ValueError:
            continue
    return result


def run_all(todo: Sequence[dict[str, Any]], rows: Path, cache: Path, workers: int, every: int) -> None:
    """Execute the runs that are not in ``rows`` yet; append one line for each as soon as it has ended."""
    done = [run["key"] for run in read(rows)]
    left = [key for key in todo if key not in done]
    click.echo(f"{len(todo) - len(left)} of {len(todo)} runs are there", err=True)
    rows.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool, rows.open("a") as out:
        waiting = {pool.submit(one, key, str(cache), every): key for key in left}
        for number, ended in enumerate(as_completed(waiting), 1):
            run = ended.result()
            out.write(json.dumps(run) + "\n")
            out.flush()
            key = run["key"]
            name = f"{key['task']} seed {key['seed']} {key['bound']} eta {key['eta']} {key['correction']}"
            shown = f"{run['reward'][0]:.2f} -> {run['reward'][-1]:.2f}, {run['seconds']:.0f} s"
            click.echo(f"{time.strftime('%H:%M:%S')} {number}/{len(left)} {name}: {shown}", err=True)


def heading() -> str:
    """Hardware, date and command, as in the files of results."""
    cores, today = os.cpu_count(), time.strftime("%Y-%m-%d")
    command = " ".join(["python bench/learning.py", *sys.argv[1:]])
    return f"# Learning under staleness, {cores} cores, Python {platform.python_version()}, {today}\n\n`{command}`\n\n"


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@click.command()
@click.option("--tasks", default=",".join(TASKS), show_default=True)
@click.option("--seeds", default="0,1,2", show_default=True)
@click.option("--etas", default=",".join(map(str, ETAS)), show_default=True, help="The synchronous runs come anyway.")
@click.option("--corrections", default=",".join(CORRECTIONS), show_default=True)
@click.option("--bounds", default=",".join(BOUNDS), show_default=True)
@click.option("--steps", default=150, show_default=True, type=click.IntRange(min=1))
@click.option("--groups", default=GROUPS, show_default=True, type=click.IntRange(min=1), help="Groups a step.")
@click.option("--every", default=EVERY, show_default=True, type=click.IntRange(min=1), help="Steps per evaluation.")
@click.option("--lrs", default="5e-4", show_default=True, help="Learning rates.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(min=1), help="Runs at once, a core each.")
@click.option("--rows", default=str(RUNS / "rows.jsonl"), show_default=True, type=click.Path(path_type=Path))
@click.option("--cache", default=str(RUNS / "models"), show_default=True, type=click.Path(path_type=Path))
@click.option("--report", default="", help="Write the tables here (.md) and the plots beside it.")
@click.option("--report-only", is_flag=True, help="Run nothing.")
def main(
    tasks: str, seeds: str, etas: str, corrections: str, bounds: str, steps: int, groups: int, every: int, lrs: str,
    workers: int, rows: Path, cache: Path, report: str, report_only: bool,
) -> None:  # fmt: skip
    """Run the grid, or a part of it, and print the tables of all finished runs."""
    chosen = grid(_list(tasks), [int(s) for s in _list(seeds)], [int(e) for e in _list(etas)],
                  _list(corrections), _list(bounds))  # fmt: skip
    same = {"steps": steps, "groups": groups, "samples": SAMPLES}
    todo = [{**key, **same, "lr": float(lr)} for key, lr in itertools.product(chosen, _list(lrs))]
    if not report_only:
        run_all(todo, rows, cache, workers, every)
    runs = [run for run in read(rows) if run["key"] in todo]
    text = tables(runs)
    click.echo(text)
    if report:
        path = Path(report)
        path.parent.mkdir(parents=True, exist_ok=True)
        pictures = plots(runs, path.with_suffix(""))
        path.write_text(
            heading() + text + "\n" + "".join(f"\n![{picture.stem}]({picture.name})\n" for picture in pictures)
        )


if __name__ == "__main__":
    main()
