"""Measure the time to a held-out reward: TRL's GRPOTrainer and staleflow, in turns, from the same model.

Both sides get the same initial model, prompts, hyper-parameters and cores, and save a checkpoint every few steps. The
checkpoints are evaluated after the run, by one process, on all held-out prompts: evaluation takes no time of either.
The clock of each side starts when its models are loaded: with the first step of TRL, and when the first engine of
staleflow has version 0. The time to a reward is interpolated between two checkpoints. Needs the extra ``trl``.

    python -m bench.time_to_reward --workload quickstart|slow-reward|tools [--seeds N] [--out FILE] [KEY=VALUE]...
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

from bench.progress import tracked

WAYS: Final = ("TRL", "staleflow")
WORKLOADS: Final = ("quickstart", "slow-reward", "tools")
TITLES: Final = ("workload", "seed", "way", "s to reward", "final reward", "steps", "s a step", "÷ TRL")


class Result(msgspec.Struct, kw_only=True):
    """Raw values of one run."""

    workload: str
    seed: int
    way: str
    curve: list[tuple[int, float, float]]
    """Step, seconds since the start, held-out reward."""
    load: float
    """Load average of the machine before the run."""

    def reached(self, goal: float) -> float | None:
        """Return the seconds until ``goal``, interpolated; None if it was not reached."""
        for (_, before, low), (_, after, high) in zip(self.curve, self.curve[1:], strict=False):
            if high >= goal:
                return before if low >= goal else before + (after - before) * (goal - low) / (high - low)
        return None

    @property
    def step_s(self) -> float:
        return self.curve[-1][1] / self.curve[-1][0]


def environment() -> dict[str, str]:
    """Return an environment in which thread counts are the defaults of each side, and idle OpenMP threads do not spin,
    as ``staleflow run`` sets it for its processes.
    """
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    return kept | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


def called(words: Sequence[str], log: Path, given: str = "") -> str:
    """Run a command and return its output; its messages go to ``log``."""
    with log.open("a") as messages:
        done = subprocess.run(
            words, input=given, stdout=subprocess.PIPE, stderr=messages, text=True, check=False, env=environment()
        )
    if done.returncode:
        raise click.ClickException(f"{' '.join(words[:6])} failed:\n{done.stdout[-500:]}{log.read_text()[-3000:]}")
    return done.stdout


def trl(name: str, seed: int, folder: Path) -> dict[int, tuple[Path, float]]:
    """Train with TRL; return the model directory and the time of each saved step."""
    called([sys.executable, "-m", "bench.time_to_reward_ways", "train", name, str(seed), str(folder)], folder / "log")
    saved: dict[int, tuple[Path, float]] = {0: (folder / "model", json.loads((folder / "started.json").read_text()))}
    for path in (folder / "trl").glob("checkpoint-*"):
        saved[int(path.name.rpartition("-")[2])] = (path, (path / "model.safetensors").stat().st_mtime)
    return saved


def ours(name: str, seed: int, folder: Path, overrides: Sequence[str]) -> dict[int, tuple[Path, float]]:
    """Train with ``staleflow run``; return the model directory and the time of each saved step."""
    from bench.time_to_reward_task import WORKLOADS as ALL

    workload, run_dir = ALL[name], folder / "run"
    called(
        [
            *(sys.executable, "-m", "staleflow.cli", "run", str(workload.config), *workload.overrides),
            *("model.build=", "model.options={}", f"model.path={folder / 'model'}", f"seed={seed}"),
            *(f"trainer.steps={workload.steps}", f"trainer.checkpoint_every={workload.evaluate_every}"),
            *("trainer.keep_checkpoints=1000", "trainer.eval_prompts=0", *overrides),
            *("--run-dir", str(run_dir), "--plain", "--json"),
        ],
        folder / "log",
    )
    saved = {0: (folder / "model", started(run_dir / "trace.jsonl"))}
    for path in run_dir.glob("checkpoints/*/checkpoint.json"):
        saved[int(path.parent.name)] = (path.parent, path.stat().st_mtime)
    return saved


def started(trace: Path) -> float:
    """Return the time at which the first engine had version 0 loaded."""
    with trace.open() as lines:
        first = next(event["t"] for event in map(json.loads, lines) if event["ev"] == "pull")
    return float(first) / 1e9


def build(name: str, seed: int, target: Path) -> None:
    """Write the initial model of a workload, outside of the clock."""
    words = ("build", name, str(seed), str(target.parent))
    called([sys.executable, "-m", "bench.time_to_reward_ways", *words], target.parent / "log")


def measured(way: str, name: str, seed: int, folder: Path, overrides: Sequence[str]) -> Result:
    """Build, train and evaluate once."""
    folder.mkdir(parents=True)
    build(name, seed, folder / "model")
    load = os.getloadavg()[0]
    saved = trl(name, seed, folder) if way == "TRL" else ours(name, seed, folder, overrides)
    steps = sorted(saved)
    command = [sys.executable, "-m", "bench.time_to_reward_ways", "evaluate", name, str(seed), str(folder)]
    paths = "\n".join(str(saved[step][0]) for step in steps)
    rewards = json.loads(called(command, folder / "log", paths).splitlines()[-1])
    started = saved[0][1]
    curve = [(step, saved[step][1] - started, reward) for step, reward in zip(steps, rewards, strict=True)]
    return Result(workload=name, seed=seed, way=way, curve=curve, load=load)


def rows(results: Sequence[Result], goals: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Format each run, and the mean ratio of a workload whose runs all reached the goal."""
    cells: list[tuple[str, ...]] = []
    times = {(one.workload, one.seed, one.way): one.reached(goals[one.workload]) for one in results}
    for one in results:
        base, mine = times.get((one.workload, one.seed, "TRL")), times[one.workload, one.seed, one.way]
        ratio = f"{base / mine:.2f}" if base and mine and one.way != "TRL" else ""
        reached = f"{mine:.0f} ({goals[one.workload]:g})" if mine else f"not reached ({goals[one.workload]:g})"
        last = one.curve[-1]
        cells.append(
            (one.workload, str(one.seed), one.way, reached, f"{last[2]:.3f}", str(last[0]), f"{one.step_s:.2f}", ratio)
        )
    for name in dict.fromkeys(one.workload for one in results):
        means = {
            way: [value for (workload, _, its), value in times.items() if (workload, its) == (name, way)]
            for way in WAYS
        }
        if all(values and None not in values for values in means.values()):
            trl_s, ours_s = (fmean(value for value in means[way] if value is not None) for way in WAYS)
            cells.append((name, "mean", "", f"{trl_s:.0f} / {ours_s:.0f}", "", "", "", f"{trl_s / ours_s:.2f}"))
    return cells


def table(cells: Sequence[tuple[str, ...]], *, markdown: bool) -> None:
    if markdown:
        click.echo("\n".join(f"| {' | '.join(row)} |" for row in (TITLES, ("---",) * len(TITLES), *cells)))
        return
    shown = Table(*TITLES)
    for row in cells:
        shown.add_row(*row)
    Console(width=max(Console().width, 110)).print(shown)


@click.command(help=__doc__)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--workload", "names", type=click.Choice(WORKLOADS), multiple=True, default=WORKLOADS)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--first-seed", default=0, show_default=True, type=click.IntRange(min=0))
@click.option("--way", "ways", type=click.Choice(WAYS), multiple=True, default=WAYS, help="Default: both.")
@click.option("--goal", type=click.FloatRange(0, 1), help="Reward to reach; default: that of the workload.")
@click.option("--runs", type=click.Path(path_type=Path), help="Keep the directories of the runs here.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file for the raw values.")
@click.option(
    "--raw", "files", type=click.Path(path_type=Path, exists=True), multiple=True, help="Show these, run nothing."
)
@click.option("--markdown", is_flag=True, help="For bench/results/.")
def main(
    overrides: tuple[str, ...],
    names: tuple[str, ...],
    seeds: int,
    first_seed: int,
    ways: tuple[str, ...],
    goal: float | None,
    runs: Path | None,
    out: Path | None,
    files: tuple[Path, ...],
    markdown: bool,
) -> None:
    if find_spec("trl") is None:
        raise click.ClickException("trl is not installed; pip install -e '.[train,trl]'")
    from bench.time_to_reward_task import WORKLOADS as ALL

    folder = (runs or Path(tempfile.mkdtemp(prefix="sf-"))) / time.strftime("%H%M%S")
    plan: list[tuple[str, int, str]] = [
        (name, seed, way) for name in names for seed in range(first_seed, first_seed + seeds) for way in ways
    ]
    results = [one for file in files for one in msgspec.json.decode(file.read_bytes(), type=list[Result])]
    for name, seed, way in tracked("runs", [] if files else plan, lambda one: " ".join(map(str, one))):
        results.append(measured(way, name, seed, folder / f"{name}-{seed}-{way}", overrides))
        if out is not None:
            out.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    results.sort(key=lambda one: (one.workload, one.seed, one.way))
    table(rows(results, {name: goal or ALL[name].goal for name in names}), markdown=markdown)


if __name__ == "__main__":
    main()
