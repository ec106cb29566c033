"""``staleflow trace``: audit a trace, print the story of a group, or plot a timeline."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staleflow.cli import options
from staleflow.cli.progress import working
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.monitor.lanes import Lane
    from staleflow.report.facts import Facts
    from staleflow.trace.audit.report import AuditReport

MAX_VIOLATIONS = 20
TRACE = "trace.jsonl"
PICTURES = (".html", ".png", ".svg", ".pdf")


@click.group("trace", short_help="Audit a trace, print the story of a group, or plot a timeline.")
def command() -> None:
    """Audit a trace, print the story of a group, or plot which process worked when."""


@command.command("check", short_help="Audit a trace; print how often each rule was checked.")
@click.argument("trace", type=options.DIRECTORY, required=False)
@options.as_json
def check(trace: Path | None, as_json: bool) -> int:
    """Audit TRACE (a trace.jsonl or a run directory; default: the newest of runs/): order, hash chain, staleness
    bound, exactly-once delivery, fencing.

    Prints how often each rule was checked. The exit code is 1 if a rule is violated, and 2 if the trace has no events.

    \b
    Examples:
      staleflow trace check runs/quickstart-20261121-053000
      staleflow trace check trace.jsonl --json
    """
    from staleflow.trace.audit.report import audit

    path = _file(options.choose_run_dir(trace, "TRACE"))
    with working("recounting the trace"):
        report = audit(path)
    if not report.lines and report.ok:
        raise ConfigError("trace", str(path), "the file has no events: nothing was checked")
    if as_json:
        import msgspec

        from staleflow.process.sanitize import json_line

        answer = msgspec.to_builtins(report, str_keys=True) | {"unchecked": report.unchecked}
        click.echo(json_line(answer))
    else:
        _print(report)
    return 0 if report.ok else 1


@command.command("show", short_help="Print the history of one group.")
@click.argument("trace", type=options.DIRECTORY)
@click.argument("group", type=int)
@options.as_json
def show(trace: Path, group: int, as_json: bool) -> int:
    """Print the history of GROUP in TRACE (a trace.jsonl or a run directory), from its first lease to its end.

    \b
    Examples:
      staleflow trace show runs/mine 117
      staleflow trace show runs/mine 117 --json      the group's lines of the trace, unchanged
    """
    from staleflow.monitor.story import events_about

    with working("reading the trace"):
        events = events_about(_file(trace), group)
    if not events:
        raise ConfigError("group", group, f"{trace} does not contain it")
    if as_json:
        for event in events:
            click.echo(json.dumps(event))
    else:
        _print_story(events, group)
    return 0


@command.command("plot", short_help="Plot which process worked when.")
@click.argument("run_dir", type=options.DIRECTORY, required=False)
@click.option(
    "--out",
    type=options.FILE,
    multiple=True,
    metavar="FILE",
    help="Output file: .html, .png, .svg or .pdf; may be repeated.",
)
@click.option(
    "--start", default=0.0, show_default=True, type=click.FloatRange(min=0), metavar="S", help="First second."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Seconds to plot. Default: all.",
)
@options.as_json
def plot(run_dir: Path | None, out: tuple[Path, ...], start: float, seconds: float | None, as_json: bool) -> int:
    """Plot a lane for each engine, stage worker and trainer of RUN_DIR (default: the newest of runs/), the staleness of
    the trained groups and the trainer's waits. Also print how long pairs of stages worked at the same time.

    An .html file is zoomable and self-contained; the other formats need the extra `plot`.

    \b
    Examples:
      staleflow trace plot runs/mine --out lanes.html
      staleflow trace plot runs/mine --out lanes.png --start 60 --seconds 30
    """
    if not out:
        options.refuse("it applies to the plot only: add --out", "start", "seconds")
    from staleflow.monitor.lanes import overlaps
    from staleflow.report.reading import read

    for path in out:
        if path.suffix not in PICTURES:
            raise ConfigError("--out", str(path), f"it must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    run_dir = options.choose_run_dir(run_dir, "RUN_DIR")
    trace = _file(run_dir)
    with working("reading the trace"):
        facts, shown = read(trace)
    if not shown:
        raise ConfigError("trace", str(run_dir), "it contains no work of any process yet")
    last = max(span.end_s for lane in shown for span in lane.spans)
    if out and start >= last:
        raise ConfigError("--start", start, f"nothing happened after second {last:.1f}")
    if out:
        with working("drawing"):
            _draw(out, trace, facts, shown, (start, last if seconds is None else start + seconds))
    together = overlaps(shown)
    if as_json:
        click.echo(json.dumps([{"stages": [one, other], "seconds": both} for one, other, both in together]))
        return 0
    for one, other, both in together:
        click.echo(f"{one} and {other} worked at the same time for {both:.2f} s")
    for path in out:
        click.echo(path)
    if not together and not out:
        click.echo("no two stages could work at the same time; --out FILE plots which process worked when")
    return 0


def _draw(
    out: tuple[Path, ...], trace: Path, facts: "Facts", shown: "list[Lane]", window_s: tuple[float, float]
) -> None:
    for path in out:
        if path.suffix == ".html":
            from staleflow.report.page import timeline

            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(timeline(trace, shown, facts, window_s), encoding="utf-8")
        else:
            from staleflow.report.picture import picture

            picture(shown, facts, path, window_s=window_s)


def _file(trace: Path) -> Path:
    path = trace / TRACE if trace.is_dir() else trace
    if not path.is_file():
        raise ConfigError("trace", str(path), "no such file")
    return path


def _print_story(events: list[dict[str, Any]], group: int) -> None:
    from rich.console import Console
    from rich.text import Text

    from staleflow.monitor.panels import TONES
    from staleflow.monitor.story import headline, story
    from staleflow.monitor.words import span

    console = Console(highlight=False)
    console.print(Text(headline(events, group), style="bold"))
    for chapter in story(events, group):
        after = Text(f"{'+' + span(chapter.after_s):>10}  ", style="dim")
        console.print(
            after.append(f"{chapter.event:<8} ", "bold").append(chapter.words, TONES[chapter.tone]), soft_wrap=True
        )


def _print(report: "AuditReport") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from staleflow.monitor.words import plural
    from staleflow.process.sanitize import printable
    from staleflow.trace.audit.report import FileRule
    from staleflow.trace.audit.state import Rule

    console = Console(highlight=False)
    table = Table(box=box.ROUNDED, title=f"{report.lines:,} events, {report.steps:,} steps, {report.tokens:,} tokens")
    table.add_column("rule")
    table.add_column("checked", justify="right", no_wrap=True)
    table.add_column("violated", justify="right", no_wrap=True)
    for rule in (*FileRule, *Rule):
        count, bad = report.checks[rule.name], report.violated[rule.name]
        checked = f"{count:,}" if count else "[yellow]nothing to check[/]"
        table.add_row(Text(rule.value), checked, f"[bold red]{bad:,}[/]" if bad else "")
    console.print(table)
    counts = "  ".join(f"{printable(name)} {count:,}" for name, count in report.events.items())
    console.print(counts, style="dim", markup=False)
    for violation in report.violations[:MAX_VIOLATIONS]:
        console.print(
            f"seq {violation.seq}: {violation.rule}: {printable(violation.why)}", style="bold red", markup=False
        )
    if report.num_violations > MAX_VIOLATIONS:
        console.print(f"… and {report.num_violations - MAX_VIOLATIONS:,} more")
    console.print(plural(report.num_violations, "violation"), style="bold green" if report.ok else "bold red")
