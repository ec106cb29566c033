"""Print the summary at the end of a run as a table."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from staleflow.monitor.words import clock, number, whole
from staleflow.process.sanitize import printable
from staleflow.supervisor.summary import Summary


def rows(it: Summary) -> list[tuple[str, str]]:
    """Return the (label, value) rows of the table in order."""
    violations = "no trace" if it.violations is None else str(it.violations)
    return [
        ("run", it.name),
        ("outcome", it.outcome + (f": {it.error}" if it.error else "")),
        ("steps", f"{it.steps:,} of {it.steps_wanted:,}"),
        (f"reward, {it.reward_of}", f"{number(it.reward_start)} → {number(it.reward_end)}"),
        ("off-policy, versions", f"mean {number(it.off_policy_mean)}, max {whole(it.off_policy_max)}"),
        ("bound", f"{it.max_staleness} ({it.bound})"),
        ("violations", violations),
        ("tokens", f"{it.tokens_trained:,} trained, {it.tokens_generated:,} generated"),
        ("tokens/s trained", whole(it.tokens_per_s)),
        ("wall time", clock(it.wall_s)),
        ("restarts", _counts(it.restarts)),
        ("groups lost", _counts(it.groups_lost)),
        ("groups filtered", f"{it.groups_filtered:,}"),
        ("failed steps", f"{it.failed_steps:,}"),
        ("run directory", it.run_dir),
        *([("model", it.model)] if it.model else []),
    ]


def print_summary(it: Summary, console: Console) -> None:
    """Print the table to a terminal or a log."""
    colour = "green" if it.good else "red"
    table = Table(box=box.ROUNDED, show_header=False, border_style=colour)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows(it):
        bad = (key == "violations" and it.violations) or (key == "outcome" and not it.good)
        table.add_row(key, Text(printable(value), style="bold red" if bad else ""))
    console.print(table)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
