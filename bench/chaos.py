"""Run the quickstart under ``staleflow chaos``, through sixty faults of every kind; measure the losses.

The faults are spread over the whole run: the time between two faults is recomputed repeatedly from the speed so far.
The goal: the run ends normally, its trace is clean, and at least 90 % of the time went into training (the best
published share for training under faults is above 80 %). Exit 1 when the goal is missed.

Effective training time is the time of every new version. A version that took more than ``STALL`` times the median
counts with the median only, whatever the reason was. Versions that a trainer repeats after a restart from a checkpoint
are not new, and the time for them is lost.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from staleflow.cli.progress import bar
from staleflow.trace.audit.report import audit

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
GOAL = 0.9
QUIET_STEPS = 20
"""Steps before the first fault; their speed is the reference."""
STALL = 3.0
LEG = 20
"""Number of faults after which the pace is recomputed."""
STEADY = (
    *("rollout.filter=none", "trainer.eval_every=0"),
    *("scheduler.lease_s=3.0", "trainer.checkpoint_every=5", "reward.workers=2"),
)
"""Settings for steps of equal length, so that a lost second is distinguishable from a long step, and for leases that
expire within a pause."""
CLI = (sys.executable, "-m", "staleflow.cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a run under chaos."""

    code: int
    faults: Counter[str]
    roles: Counter[str]
    summary: dict[str, Any]
    violations: int
    effective: float
    """Share of the time from the first version to the last that was not lost."""
    quiet_step_s: float
    """Mean time of a version before the first fault."""
    step_s: float
    """Mean time of a version over the whole run, everything included."""
    wall_s: float
    events: Counter[str]

    @property
    def good(self) -> bool:
        return not self.code and not self.violations and self.effective >= GOAL


def events(run_dir: Path, *names: str) -> Iterator[dict[str, Any]]:
    """Complete lines of the trace so far that record these events."""
    path = run_dir / "trace.jsonl"
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:
            event = json.loads(line)
            if event["ev"] in names:
                yield event


def gaps(run_dir: Path) -> list[tuple[float, float]]:
    """(unix seconds at its end, seconds) of each new version: one with a higher number than all versions before it."""
    highest, last, result = 0, 0.0, list[tuple[float, float]]()
    for event in events(run_dir, "publish"):
        now = event["t"] / 1e9
        if not last:
            last = now
        elif event["version"] > highest:
            highest = event["version"]
            result.append((now, now - last))
            last = now
    return result


def effective(seconds: Sequence[float]) -> float:
    """Share of the time that was not lost."""
    ordinary = statistics.median(seconds)
    return sum(second if second <= STALL * ordinary else ordinary for second in seconds) / sum(seconds)


def until_quick(run_dir: Path, process: "subprocess.Popen[bytes]") -> float:
    """Wait for the quiet steps; return the mean seconds of one, without the first, which includes the
    start of all processes."""
    while len(result := gaps(run_dir)) < QUIET_STEPS:
        if process.poll() is not None:
            raise SystemExit(f"the run ended early with {process.returncode}")
        time.sleep(1.0)
    return statistics.mean(second for _, second in result[1:])


def harm(run_dir: Path, *, steps: int, faults: int, seed: int) -> list[dict[str, Any]]:
    """Inject all faults, in legs; return the report of each fault."""
    sent: list[dict[str, Any]] = []
    with bar("faults") as notify:
        while len(sent) < faults:
            notify(len(sent), faults, sent[-1]["kind"] if sent else "")
            result = gaps(run_dir)
            recent = statistics.mean(second for _, second in result[len(result) // 2 :])
            every = max(0.95 * recent * (steps - len(result)) / (faults - len(sent)), 1.0)
            leg = [*CLI, "chaos", str(run_dir), "--json", "--every", f"{every:.2f}", "--seed", str(seed + len(sent))]
            leg += ["--faults", str(min(LEG, faults - len(sent)))]
            done = subprocess.run(leg, stdout=subprocess.PIPE, text=True, check=False)
            sent += [json.loads(line) for line in done.stdout.splitlines()]
            if done.returncode:
                break
            time.sleep(every)
    return sent


def harmed(run_dir: Path, overrides: Sequence[str], *, steps: int, faults: int, seed: int, log: Path) -> Outcome:
    """Run the quickstart once under chaos."""
    started = time.monotonic()
    command = [*CLI, "run", str(CONFIG), f"trainer.steps={steps}", *STEADY, *overrides]
    with log.open("wb") as output:
        run = subprocess.Popen([*command, "--run-dir", str(run_dir), "--plain"], stdout=output, stderr=output)
        quiet_s = until_quick(run_dir, run)
        done = harm(run_dir, steps=steps, faults=faults, seed=seed)
        code = run.wait()
    report = audit(run_dir / "trace.jsonl")
    seconds = [second for _, second in gaps(run_dir)]
    return Outcome(
        code=code,
        faults=Counter(fault["kind"] for fault in done),
        roles=Counter(fault["name"] for fault in done),
        summary=json.loads((run_dir / "summary.json").read_text()),
        violations=report.num_violations,
        effective=effective(seconds),
        quiet_step_s=quiet_s,
        step_s=statistics.mean(seconds),
        wall_s=time.monotonic() - started,
        events=report.events,
    )


def table(outcome: Outcome) -> list[tuple[str, str]]:
    """Lines of the printed report."""
    summary = outcome.summary
    named = ("rollback", "join", "open", "release:expired", "release:aborted", "drop:quarantine", "reject:stale_lease")
    return [
        ("faults", f"{outcome.faults.total()}: {dict(sorted(outcome.faults.items()))}"),
        ("of", f"{dict(sorted(outcome.roles.items()))}"),
        ("exit code, outcome", f"{outcome.code}, {summary['outcome']} {summary['error']}"),
        ("steps", f"{summary['steps']} of {summary['steps_wanted']}"),
        ("violations", str(outcome.violations)),
        ("off-policy max, bound", f"{summary['off_policy_max']}, {summary['max_staleness']}"),
        ("reward", f"{summary['reward_start']} to {summary['reward_end']}"),
        ("restarts", f"{summary['restarts']}"),
        ("seen in the trace", f"{ {name: outcome.events[name] for name in named} }"),
        ("mean step, quiet and whole run", f"{outcome.quiet_step_s:.2f} s, {outcome.step_s:.2f} s"),
        ("effective training time", f"{outcome.effective:.1%}"),
        ("wall time", f"{outcome.wall_s:.0f} s"),
    ]


@click.command(help=__doc__)
@click.argument("overrides", nargs=-1)
@click.option("--steps", default=5000, show_default=True, type=click.IntRange(min=2 * QUIET_STEPS))
@click.option("--faults", default=60, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Default: a temporary one.")
def main(overrides: tuple[str, ...], steps: int, faults: int, seed: int, run_dir: Path | None) -> None:
    folder = run_dir or Path(tempfile.mkdtemp(prefix="sf-")) / "run"
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    outcome = harmed(folder, overrides, steps=steps, faults=faults, seed=seed, log=log)
    for row in (("", ""), ("---", "---"), *table(outcome)):
        click.echo(f"| {row[0]} | {row[1]} |")
    sys.exit(0 if outcome.good else 1)


if __name__ == "__main__":
    main()
