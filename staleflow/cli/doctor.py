"""``staleflow doctor``: check whether this machine can run staleflow."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.supervisor.checkup import Finding


@click.command("doctor", short_help="Check whether this machine is ready for a run.")
@options.overrides
@options.config_file
@click.option(
    "--run-dir", type=options.DIRECTORY, default=Path("runs"), metavar="DIR", help="Directory whose disk is checked."
)
@click.option("--measure", is_flag=True, help="Also run the service for ten seconds and report its throughput.")
@options.as_json
def command(overrides: tuple[str, ...], config_file: Path | None, run_dir: Path, measure: bool, as_json: bool) -> int:
    """Check Python, torch and its device, engines, disk, memory, limits and sockets; with --config, also the needs of
    that run.

    Prints what this machine can run and what to install for the rest. --measure runs the whole service for ten seconds
    with a simulated engine and a simulated trainer. The result is the throughput between them in trajectories per
    second and, with --config, the steps per minute that this allows.

    The exit code is 1 if a check fails that a run needs.

    \b
    Examples:
      staleflow doctor
      staleflow doctor --measure --config configs/quickstart.toml
      staleflow doctor --config configs/quickstart.toml rollout.engine=vllm
    """
    from staleflow.cli.progress import bar
    from staleflow.supervisor.checkup import abilities, examine

    if overrides and config_file is None:
        raise ConfigError("override", overrides[0], "overrides change a configuration: add --config")
    with bar("checking", quiet=as_json) as update:
        findings = examine(config_file, overrides, run_dir, update)
    bad = [finding.what for finding in findings if finding.state == "bad"]
    if measure:
        findings += _unmeasured(bad) if bad else _measured(config_file, overrides, run_dir)
    findings += abilities(findings)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(findings).decode())
    else:
        show(findings)
    return 1 if any(finding.state == "bad" for finding in findings) else 0


def _unmeasured(bad: list[str]) -> "list[Finding]":
    from staleflow.supervisor.checkup import Finding

    return [Finding("trajectories", "missing", f"not measured: fix {', '.join(bad)} first")]


def _measured(config_file: Path | None, overrides: tuple[str, ...], run_dir: Path) -> "list[Finding]":
    from staleflow.cli.progress import bar
    from staleflow.configs.loading.load import load
    from staleflow.supervisor.sustained import sustained

    config = load(config_file, overrides) if config_file else None
    place = next(path for path in (run_dir, *run_dir.resolve().parents) if path.is_dir())
    with bar("a run without a model") as update:
        return list(sustained(config, place, lambda share: update(share, 1.0, "")))


def show(findings: "list[Finding]") -> None:
    """Print the findings as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"good": "green", "missing": "yellow", "bad": "bold red"}
    table = Table(box=box.ROUNDED)
    for column in ("what", "state", "found"):
        table.add_column(column, no_wrap=column != "found")
    for finding in findings:
        table.add_row(finding.what, Text(finding.state, style=colours[finding.state]), Text(finding.found))
    Console(highlight=False).print(table)
