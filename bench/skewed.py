"""Compare a real run with the simulator: ``configs/skewed.toml`` with all its processes, and in virtual time.

Both write the same trace, so both are read alike: steps a minute (without the first and the last steps), staleness, and
the intervals between two steps: the time until a version reaches an engine, until a group is written, and until it is
judged. Where the two differ in these intervals, the configuration's [simulation] does not match this machine. The
machine must have two cores for this run alone. Exit 1 when steps a minute or staleness differ by more than 10 %.

    python -m bench.skewed [CONFIG] [KEY=VALUE]... [--markdown]
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.progress import tracked
from staleflow.configs.loading.load import load
from staleflow.configs.schema import Config
from staleflow.sim.measure import steps_per_min
from staleflow.sim.result import StepRow
from staleflow.sim.simulate import TRACE, simulate
from staleflow.trace.events import Occupy, Publish, Pull, Push
from staleflow.trace.fold import Batch, Fold
from staleflow.trace.reader import read_lines

CONFIG = Path(__file__).parent.parent / "configs" / "skewed.toml"
WITHIN = 0.1
SEEDS = 5
"""Number of simulations; the real run is compared with their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Measurements from the trace of a run; seconds are medians."""

    steps_per_min: float
    staleness: float
    train_s: float
    """From the later of batch and last version to the next version."""
    pull_s: float
    """From a version to an engine that has loaded it."""
    stages_s: float
    """From the push of a group until it may train."""
    group_s: float
    """From a lease to its push."""
    longest_s: float
    """The same interval, 99th percentile of the groups."""


LINES: tuple[tuple[str, Callable[[Seen], float], bool], ...] = (
    ("steps a minute", lambda seen: seen.steps_per_min, True),
    ("staleness, mean", lambda seen: seen.staleness, True),
    ("train step, s", lambda seen: seen.train_s, False),
    ("version to an engine, s", lambda seen: seen.pull_s, False),
    ("push to occupied, s", lambda seen: seen.stages_s, False),
    ("lease to push, s", lambda seen: seen.group_s, False),
    ("lease to push, 99 %, s", lambda seen: seen.longest_s, False),
)
"""Label, measurement, and True if the two runs must agree in it."""


def read(trace: Path, max_staleness: int) -> Seen:
    """Read a trace of one incarnation."""
    fold = Fold()
    pull_s, stages_s, group_s, published_s = list[float](), list[float](), list[float](), dict[int, float]()
    for line in fold.over(read_lines(trace)):
        group = fold.group
        match line.event:
            case Push() if group is not None:
                group_s.append(fold.now_s - group.reserved_s)
            case Occupy() if group is not None:
                stages_s.append(fold.now_s - group.pushed_s)
            case Publish() as event:
                published_s[event.version] = fold.now_s
            case Pull() as event:
                pull_s.append(fold.now_s - published_s[event.version])
            case _:
                pass
    rows = step_rows(fold.trained)
    return Seen(
        steps_per_min=steps_per_min(rows, max_staleness + 1),
        staleness=statistics.fmean(row.staleness_mean for row in rows),
        train_s=statistics.median(row.ended_s - row.began_s for row in rows),
        pull_s=statistics.median(pull_s),
        stages_s=statistics.median(stages_s),
        group_s=statistics.median(group_s),
        longest_s=statistics.quantiles(group_s, n=100)[-1],
    )


def step_rows(batches: Sequence[Batch]) -> list[StepRow]:
    rows: list[StepRow] = []
    for batch in batches:
        assert batch.delivered_s is not None
        rows.append(
            StepRow(
                step=batch.step,
                delivered_s=batch.delivered_s,
                began_s=max([batch.delivered_s, *(row.ended_s for row in rows[-1:])]),
                ended_s=batch.consumed_s,
                staleness_mean=batch.age_mean,
                staleness_max=batch.age_max,
                tokens=batch.tokens,
                masked=batch.masked_tokens,
            )
        )
    return rows


def real(file: Path, overrides: Sequence[str], max_staleness: int) -> Seen:
    """Run ``staleflow run``; its view goes to the terminal's error stream."""
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "staleflow.cli", "run", str(file), *overrides, "--run-dir", str(run_dir)]
        subprocess.run([*command, "--json"], stdout=subprocess.DEVNULL, check=True)
        return read(run_dir / TRACE, max_staleness)


def simulated(config: Config) -> Seen:
    """Run the same configuration in virtual time."""
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        simulate(config, run_dir=Path(folder))
        return read(Path(folder) / TRACE, config.staleness.max_staleness)


@click.command(help=__doc__)
@click.argument("file", default=CONFIG, type=click.Path(exists=True, path_type=Path), metavar="[CONFIG]")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--markdown", is_flag=True, help="For bench/results/.")
def main(file: Path, overrides: tuple[str, ...], markdown: bool) -> None:
    config = load(file, overrides)
    ran = real(file, overrides, config.staleness.max_staleness)
    seeds = [
        simulated(load(file, (*overrides, f"seed={seed}")))
        for seed in tracked("simulated", range(SEEDS), "seed {}".format)
    ]
    rows: list[tuple[str, ...]] = []
    agrees = True
    for what, of, judged in LINES:
        one, others = of(ran), [of(observed) for observed in seeds]
        mean = statistics.fmean(others)
        differs = one / mean - 1.0 if mean else 0.0
        agrees = agrees and not (judged and abs(differs) > WITHIN)
        met = "" if not judged else "yes" if abs(differs) <= WITHIN else "no"
        rows.append((what, f"{one:.3f}", f"{mean:.3f} ± {statistics.stdev(others):.3f}", f"{differs:+.1%}", met))
    titles = (file.name, "real run", f"simulated, {SEEDS} seeds", "difference", f"within {WITHIN:.0%}")
    if markdown:
        click.echo("\n".join(f"| {' | '.join(row)} |" for row in (titles, ("---",) * len(titles), *rows)))
    else:
        table = Table(*titles)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    main()
