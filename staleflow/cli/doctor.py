"""``staleflow doctor``: is this machine fit for a run?"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli import options

if TYPE_CHECKING:
    from staleflow.supervisor.checkup import Finding


@click.command("doctor", short_help="Is this machine fit for a run?")
@options.overrides
@options.config_file
@click.option(
    "--run-dir", type=options.DIRECTORY, default=Path("runs"), metavar="DIR", help="Where its disk is measured."
)
@options.as_json
def command(overrides: tuple[str, ...], config_file: Path | None, run_dir: Path, as_json: bool) -> int:
    """Look at Python, torch and its device, engines, disk, memory, limits and sockets; with --config at a run's needs.

    Exit code 1 when something would keep a run from working.
    """
    from staleflow.supervisor.checkup import examine

    findings = examine(config_file, overrides, run_dir)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(findings).decode())
    else:
        _print(findings)
    return 1 if any(finding.state == "bad" for finding in findings) else 0


def _print(findings: "list[Finding]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    colours = {"good": "green", "missing": "yellow", "bad": "bold red"}
    table = Table(box=box.ROUNDED)
    for column in ("what", "state", "found"):
        table.add_column(column, no_wrap=column != "found")
    for finding in findings:
        table.add_row(finding.what, f"[{colours[finding.state]}]{finding.state}[/]", finding.found)
    Console(highlight=False).print(table)
