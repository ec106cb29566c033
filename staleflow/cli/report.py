"""``staleflow report``: write an HTML report of a run."""

from pathlib import Path

import click

from staleflow.cli import options
from staleflow.cli.progress import bar
from staleflow.configs.errors import ConfigError


@click.command("report", short_help="Write an HTML report of a run.")
@click.argument("run_dir", type=options.DIRECTORY, required=False)
@click.option("--out", type=options.FILE, metavar="FILE", help="An .html file. Default: report.html in RUN_DIR.")
def command(run_dir: Path | None, out: Path | None) -> int:
    """Write an HTML report of the run in RUN_DIR (default: the newest of runs/), running or ended: rewards, staleness,
    waits, wasted work, failures and configuration. The page is self-contained and loads nothing from the network.

    \b
    Examples:
      staleflow report runs/quickstart-20261121-053000
      staleflow report runs/mine --out /tmp/mine.html
    """
    from staleflow.process.sanitize import printable
    from staleflow.report.page import report
    from staleflow.supervisor.rundir import died

    run_dir = options.choose_run_dir(run_dir, "RUN_DIR")
    path = out or run_dir / "report.html"
    if path.suffix != ".html":
        raise ConfigError("--out", str(path), "the name must end in .html")
    with bar("reading the trace"):
        text = report(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    click.echo(path)
    if not _may_run(run_dir) and (ended := died(run_dir)) is not None:
        click.echo(printable(f"staleflow: {ended}"), err=True)
    return 0


def _may_run(run_dir: Path) -> bool:
    """Return whether the run's scheduler may be listening."""
    from staleflow.configs.loading.load import planned, read_run
    from staleflow.supervisor.addresses import may_answer

    return may_answer(planned(read_run(run_dir), run_dir).scheduler)
