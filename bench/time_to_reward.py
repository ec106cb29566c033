"""Measure the time to a held-out reward: TRL's GRPOTrainer and staleflow, in turns, from the same model.

``--way`` chooses TRL, staleflow with the bound of the workload's configuration, or staleflow with another bound or
correction. All get the same initial model, prompts, hyper-parameters and cores, and save a checkpoint every few steps.
The checkpoints are evaluated after the run, by one process, on all held-out prompts: evaluation takes no time of any.
The clock of each starts when its models are loaded: with the first step of TRL, and when the first engine of staleflow
has version 0. The time to a reward is interpolated between two checkpoints. Needs the extra ``trl``.

Each finished run is appended to ``--out`` as one line of JSON. Runs that are in this file already are not repeated, so
that a campaign may be stopped and continued. Wall-clock times depend on the load of the machine; the processor
seconds, over all processes of a run from their start to their end, hardly do.

    python -m bench.time_to_reward --workload quickstart|slow-reward|tools|smollm2 [--seeds N] [--out FILE]
        [--way WAY]... [KEY=VALUE]...
    python -m bench.time_to_reward --workload smollm2 --all-ways --seeds 3 --out runs/smollm2.jsonl
    python -m bench.time_to_reward --workload smollm2 --raw runs/smollm2.jsonl --base synchronous --markdown
"""

import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

from bench.progress import tracked

WAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "TRL": (),
    "staleflow": (),
    "synchronous": ("staleness.max_staleness=0",),
    "one-step-off": ("staleness.max_staleness=1", "rollout.on_update=drain"),
    "eta-1": ("staleness.max_staleness=1",),
    "eta-2": ("staleness.max_staleness=2",),
    "eta-4": ("staleness.max_staleness=4",),
    "token-2": ("staleness.max_staleness=2", "staleness.bound=token"),
    "eta-2-uncorrected": ("staleness.max_staleness=2", "trainer.algorithm.correction=none"),
    "eta-4-uncorrected": ("staleness.max_staleness=4", "trainer.algorithm.correction=none"),
}
"""Settings of each way, on top of the workload's. ``one-step-off``: a version generates exactly the next step's batch,
and samples never continue with newer weights."""
WORKLOADS: Final = ("quickstart", "slow-reward", "tools", "smollm2")
TITLES: Final = (
    *("workload", "seed", "way", "s to reward", "final reward", "steps", "s a step", "processor s", "mean age"),
    *("load", "÷ base"),
)


class Result(msgspec.Struct, kw_only=True):
    """Raw values of one run."""

    workload: str
    seed: int
    way: str
    curve: list[tuple[int, float, float]]
    """Step, seconds since the start, held-out reward."""
    load: float
    """Load average of the machine before the run."""
    processor_s: float = 0.0
    """Processor seconds of training, over all processes; 0: not measured."""
    age: float = 0.0
    """Mean age of the trained groups in versions."""
    overrides: tuple[str, ...] = ()

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
        weights = next(path.glob("*model.safetensors"))  # or adapter_model.safetensors
        saved[int(path.name.rpartition("-")[2])] = (path, weights.stat().st_mtime)
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


def mean_age(metrics: Path) -> float:
    """Return the mean of ``off_policy/mean`` over the steps of a run."""
    with metrics.open() as lines:
        return fmean(row["off_policy/mean"] for row in map(json.loads, lines) if "off_policy/mean" in row)


def processor_seconds() -> float:
    """Return the processor time of all processes that have ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def build(name: str, seed: int, target: Path) -> None:
    """Write the initial model of a workload, outside of the clock."""
    words = ("build", name, str(seed), str(target.parent))
    called([sys.executable, "-m", "bench.time_to_reward_ways", *words], target.parent / "log")


def measured(way: str, name: str, seed: int, folder: Path, overrides: Sequence[str]) -> Result:
    """Build, train and evaluate once."""
    folder.mkdir(parents=True)
    build(name, seed, folder / "model")
    load, before, age = os.getloadavg()[0], processor_seconds(), 0.0
    if way == "TRL":
        saved = trl(name, seed, folder)
    else:
        saved = ours(name, seed, folder, (*WAYS[way], *overrides))
        age = mean_age(folder / "run" / "metrics.jsonl")
    used = processor_seconds() - before
    steps = sorted(saved)
    command = [sys.executable, "-m", "bench.time_to_reward_ways", "evaluate", name, str(seed), str(folder)]
    paths = "\n".join(str(saved[step][0]) for step in steps)
    rewards = json.loads(called(command, folder / "log", paths).splitlines()[-1])
    started = saved[0][1]
    curve = [(step, saved[step][1] - started, reward) for step, reward in zip(steps, rewards, strict=True)]
    return Result(
        workload=name,
        seed=seed,
        way=way,
        curve=curve,
        load=load,
        processor_s=round(used, 1),
        age=round(age, 3),
        overrides=tuple(overrides),
    )


def read(file: Path) -> list[Result]:
    """Return the results of a file: lines of JSON, or one list. Leave out a last line that was cut off."""
    text = file.read_bytes() if file.is_file() else b""
    if text.startswith(b"["):
        return msgspec.json.decode(text, type=list[Result])
    whole = text[: text.rfind(b"\n") + 1]
    return msgspec.json.Decoder(Result).decode_lines(whole)


def missing(
    results: Sequence[Result], names: Sequence[str], seeds: Iterable[int], ways: Sequence[str], overrides: Sequence[str]
) -> list[tuple[str, int, str]]:
    """Return workload, seed and way of each run of a campaign that has no result with these overrides yet."""
    done = {(one.workload, one.seed, one.way) for one in results if one.overrides == tuple(overrides)}
    return [one for one in itertools.product(names, seeds, ways) if one not in done]


def rows(results: Sequence[Result], goals: Mapping[str, float], base: str) -> list[tuple[str, ...]]:
    """Format each run, and the mean ratio of each way whose runs, and those of the base, all reached the goal."""
    cells: list[tuple[str, ...]] = []
    times = {(one.workload, one.seed, one.way): one.reached(goals[one.workload]) for one in results}
    for one in results:
        first, mine = times.get((one.workload, one.seed, base)), times[one.workload, one.seed, one.way]
        ratio = f"{first / mine:.2f}" if first and mine and one.way != base else ""
        reached = f"{mine:.0f} ({goals[one.workload]:g})" if mine else f"not reached ({goals[one.workload]:g})"
        step, _, reward = one.curve[-1]
        used = f"{one.processor_s:.0f}" if one.processor_s else ""
        age = f"{one.age:.2f}" if used and one.way != "TRL" else ""
        what = (one.workload, str(one.seed), one.way, reached, f"{reward:.3f}", str(step), f"{one.step_s:.2f}")
        cells.append((*what, used, age, f"{one.load:.1f}", ratio))
    for name, way in dict.fromkeys((one.workload, one.way) for one in results if one.way != base):
        seeds = [seed for workload, seed, its in times if (workload, its) == (name, way)]
        pairs = [(times.get((name, seed, base)), times[name, seed, way]) for seed in seeds]
        both = [(first, mine) for first, mine in pairs if first and mine]
        if len(seeds) > 1 and len(both) == len(pairs):
            first_s, mine_s = (fmean(column) for column in zip(*both, strict=True))
            means = f"{first_s:.0f} / {mine_s:.0f}"
            cells.append((name, "mean", f"{base} / {way}", means, *[""] * 6, f"{first_s / mine_s:.2f}"))
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
@click.option(
    "--way", "ways", type=click.Choice(list(WAYS)), multiple=True, default=("TRL", "staleflow"), show_default=True
)
@click.option("--all-ways", is_flag=True, help="TRL, and staleflow with every bound.")
@click.option("--base", type=click.Choice(list(WAYS)), default="TRL", show_default=True, help="Of the last column.")
@click.option("--goal", type=click.FloatRange(0, 1), help="Reward to reach; default: that of the workload.")
@click.option("--runs", type=click.Path(path_type=Path), help="Keep the directories of the runs here.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON lines, one for each run; continued.")
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
    all_ways: bool,
    base: str,
    goal: float | None,
    runs: Path | None,
    out: Path | None,
    files: tuple[Path, ...],
    markdown: bool,
) -> None:
    if find_spec("trl") is None:
        raise click.ClickException("trl is not installed; pip install -e '.[train,trl]'")
    from bench.time_to_reward_task import WORKLOADS as ALL

    results = [one for file in files or ([out] if out else []) for one in read(file)]
    chosen = [way for way in WAYS if way != "staleflow"] if all_ways else ways
    plan = missing(results, names, range(first_seed, first_seed + seeds), chosen, overrides)
    folder = (runs or Path(tempfile.mkdtemp(prefix="sf-"))) / time.strftime("%H%M%S")
    for name, seed, way in tracked("runs", [] if files else plan, lambda one: " ".join(map(str, one))):
        place = folder / f"{name}-{seed}-{way}"
        results.append(measured(way, name, seed, place, overrides))
        if runs is None:
            shutil.rmtree(place)  # checkpoints of a real model fill a disk
        if out is not None:
            with out.open("ab") as lines:
                lines.write(msgspec.json.encode(results[-1]) + b"\n")
    results.sort(key=lambda one: (one.workload, one.seed, one.way))
    results = [one for one in results if one.workload in names]
    table(rows(results, {name: goal or ALL[name].goal for name in names}, base), markdown=markdown)


if __name__ == "__main__":
    main()
