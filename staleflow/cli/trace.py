"""``staleflow trace``: the audit log, checked and told."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staleflow.cli import options
from staleflow.cli.progress import working
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.monitor.lanes import Lane
    from staleflow.trace.audit.report import AuditReport

MAX_VIOLATIONS = 20
TRACE = "trace.jsonl"
PICTURES = (".html", ".png", ".svg", ".pdf")


@click.group("trace", short_help="Audit a trace, tell the story of a group, or draw it.")
def command() -> None:
    """Audit a trace, tell the story of a group, or draw who was at work when."""


@command.command("check", short_help="Audit it; say what each rule had to check.")
@click.argument("trace", type=options.DIRECTORY, required=False)
@options.as_json
def check(trace: Path | None, as_json: bool) -> int:
    """Audit TRACE (a trace.jsonl or a run directory; default: the newest of runs/): order, hash chain, the bound,
    exactly-once, fencing.

    Prints what each rule had to check; exit code 1 when one is violated, 2 when there is no event to check.

    \b
    Examples:
      staleflow trace check runs/quickstart-20261121-053000
      staleflow trace check trace.jsonl --json
    """
    from staleflow.trace.audit.report import audit

    path = _file(options.run_meant(trace, "TRACE"))
    with working("recounting the trace"):
        report = audit(path)
    if not report.lines and report.ok:
        raise ConfigError("trace", str(path), "a file with events: this one is empty, nothing was checked")
    if as_json:
        import msgspec

        from staleflow.process.sanitize import json_line

        answer = msgspec.to_builtins(report, str_keys=True) | {"unchecked": report.unchecked}
        click.echo(json_line(answer))
    else:
        _print(report)
    return 0 if report.ok else 1


@command.command("show", short_help="Tell what became of one group.")
@click.argument("trace", type=options.DIRECTORY)
@click.argument("group", type=int)
@options.as_json
def show(trace: Path, group: int, as_json: bool) -> int:
    """Tell what became of GROUP in TRACE (a trace.jsonl or a run directory), from its first lease to its end.

    \b
    Examples:
      staleflow trace show runs/mine 117
      staleflow trace show runs/mine 117 --json      the lines of the trace as they are
    """
    from staleflow.monitor.story import events_about

    with working("reading the trace"):
        found = events_about(_file(trace), group)
    if not found:
        raise ConfigError("group", group, f"{trace} never mentions it")
    if as_json:
        for event in found:
            click.echo(json.dumps(event))
    else:
        _tell(found, group)
    return 0


@command.command("plot", short_help="Draw who was at work when.")
@click.argument("run_dir", type=options.DIRECTORY, required=False)
@click.option(
    "--out",
    type=options.FILE,
    multiple=True,
    metavar="FILE",
    help="An .html, .png, .svg or .pdf; as often as you like.",
)
@click.option(
    "--start", default=0.0, show_default=True, type=click.FloatRange(min=0), metavar="S", help="First second."
)
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), metavar="S", help="How many. Default: all.")
@options.as_json
def plot(run_dir: Path | None, out: tuple[Path, ...], start: float, seconds: float | None, as_json: bool) -> int:
    """Draw a lane for each engine, stage worker and trainer of RUN_DIR (default: the newest of runs/), the age of what
    was trained and the trainer's waits; say how long stages worked at the same time.

    An .html file can be zoomed into and loads nothing from elsewhere; the others need the extra `plot`.

    \b
    Examples:
      staleflow trace plot runs/mine --out lanes.html
      staleflow trace plot runs/mine --out lanes.png --start 60 --seconds 30
    """
    if not out:
        options.refuse("it is of the picture: add --out", "start", "seconds")
    from staleflow.monitor.lanes import lanes, overlaps, stage_lines
    from staleflow.trace.writer import read_events

    for path in out:
        if path.suffix not in PICTURES:
            raise ConfigError("--out", str(path), f"it must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    run_dir = options.run_meant(run_dir, "RUN_DIR")
    trace = _file(run_dir)
    with working("reading the trace"):
        shown = lanes(read_events(trace), stage_lines(trace.parent))
    if not shown:
        raise ConfigError("trace", str(run_dir), "nobody has done anything in it yet")
    last = max(span.end_s for lane in shown for span in lane.spans)
    if out and start >= last:
        raise ConfigError("--start", start, f"nothing happened after second {last:.1f}")
    if out:
        with working("drawing"):
            _draw(out, trace, shown, (start, last if seconds is None else start + seconds))
    together = overlaps(shown)
    if as_json:
        click.echo(json.dumps([{"stages": [one, other], "seconds": both} for one, other, both in together]))
        return 0
    for one, other, both in together:
        click.echo(f"{one} and {other} were at work at the same time for {both:.2f} s")
    for path in out:
        click.echo(path)
    if not together and not out:
        click.echo("there are no two stages that could work at the same time; --out FILE draws who was at work when")
    return 0


def _draw(out: tuple[Path, ...], trace: Path, shown: "list[Lane]", window_s: tuple[float, float]) -> None:
    from staleflow.report.reading import Reader
    from staleflow.trace.writer import read_events

    facts = Reader().read(read_events(trace))
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


def _tell(events: list[dict[str, Any]], group: int) -> None:
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
        console.print(f"and {report.num_violations - MAX_VIOLATIONS:,} more")
    console.print(plural(report.num_violations, "violation"), style="bold green" if report.ok else "bold red")
