"""``staleflow trace``: the audit log, checked and told."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.runtime.audit import AuditReport

MOST_VIOLATIONS = 20
TRACE = "trace.jsonl"


@click.group("trace")
def command() -> None:
    """Audit a trace, tell the story of a group, or draw who was at work when."""


@command.command("check")
@click.argument("trace", type=options.DIRECTORY)
@options.as_json
def check(trace: Path, as_json: bool) -> int:
    """Audit TRACE (a trace.jsonl or a run directory): order, hash chain, the bound, exactly-once, fencing.

    Prints what each rule had to check; exit code 1 when one is violated.
    """
    from staleflow.runtime.audit import audit

    path = _file(trace)
    report = audit(path)
    if as_json:
        import msgspec

        answer = msgspec.to_builtins(report, str_keys=True) | {"unchecked": report.unchecked}
        click.echo(msgspec.json.encode(answer).decode())
    else:
        _print(report)
    return 0 if report.ok else 1


@command.command("show")
@click.argument("trace", type=options.DIRECTORY)
@click.argument("group", type=int)
@options.as_json
def show(trace: Path, group: int, as_json: bool) -> int:
    """Print every event of GROUP in TRACE, from its reservation to its end."""
    from staleflow.runtime.trace import read_events

    found = [event for event in read_events(_file(trace)) if _is_about(event, group)]
    if not found:
        raise ConfigError("group", group, f"{trace} never mentions it")
    for event in found:
        click.echo(json.dumps(event) if as_json else _line(event))
    return 0


@command.command("plot")
@click.argument("run_dir", type=options.DIRECTORY)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="A .png, .svg or .pdf. Default: none.")
@click.option(
    "--start", default=0.0, show_default=True, type=click.FloatRange(min=0), metavar="S", help="First second."
)
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), metavar="S", help="How many. Default: all.")
@options.as_json
def plot(run_dir: Path, out: Path | None, start: float, seconds: float | None, as_json: bool) -> int:
    """Draw a lane for each engine, stage worker and trainer of RUN_DIR; say how long stages worked at the same time."""
    from staleflow.monitor.lanes import lanes, overlaps, stage_lines
    from staleflow.runtime.trace import read_events

    shown = lanes(read_events(_file(run_dir)), stage_lines(run_dir))
    if not shown:
        raise ConfigError("trace", str(run_dir), "nobody has done anything in it yet")
    if out is not None:
        from staleflow.monitor.lanes_plot import plot as draw

        end = max(lane.spans[-1].end_s for lane in shown) if seconds is None else start + seconds
        draw(shown, out, window_s=(start, end))
    together = overlaps(shown)
    if as_json:
        click.echo(json.dumps([{"stages": [one, other], "seconds": both} for one, other, both in together]))
        return 0
    for one, other, both in together:
        click.echo(f"{one} and {other} were at work at the same time for {both:.2f} s")
    return 0


def _file(trace: Path) -> Path:
    path = trace / TRACE if trace.is_dir() else trace
    if not path.is_file():
        raise ConfigError("trace", str(path), "no such file")
    return path


def _is_about(event: dict[str, Any], group: int) -> bool:
    members = (member.get("group") for member in event.get("members") or ())
    return group in (event.get("group"), event.get("demoted")) or group in members


def _line(event: dict[str, Any]) -> str:
    shown = (
        "lease",
        "worker",
        "lineage",
        "version",
        "deadline",
        "spare",
        "shard",
        "bytes",
        "why",
        "step",
        "batch",
        "code",
    )
    said = "  ".join(f"{key} {event[key]}" for key in shown if event.get(key) is not None)
    return f"{event.get('seq', '?'):>8}  {event.get('ev', '?'):<8}  {said}"


def _print(report: "AuditReport") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from staleflow.runtime.audit import FileRule
    from staleflow.runtime.audit_books import Rule

    console = Console(highlight=False)
    broken = Counter(violation.rule.name for violation in report.violations)
    table = Table(box=box.ROUNDED, title=f"{report.lines:,} events, {report.steps:,} steps, {report.tokens:,} tokens")
    table.add_column("rule")
    table.add_column("checked", justify="right", no_wrap=True)
    table.add_column("violated", justify="right", no_wrap=True)
    for rule in (*FileRule, *Rule):
        count, bad = report.checks[rule.name], broken[rule.name]
        checked = f"{count:,}" if count else "[yellow]nothing to check[/]"
        table.add_row(Text(rule.value), checked, f"[bold red]{bad:,}[/]" if bad else "")
    console.print(table)
    console.print("  ".join(f"{name} {count:,}" for name, count in report.events.items()), style="dim")
    for violation in report.violations[:MOST_VIOLATIONS]:
        console.print(f"seq {violation.seq}: {violation.rule}: {violation.why}", style="bold red", markup=False)
    if report.num_violations > MOST_VIOLATIONS:
        console.print(f"and {report.num_violations - MOST_VIOLATIONS:,} more")
    console.print(f"{report.num_violations:,} violations", style="bold green" if report.ok else "bold red")
