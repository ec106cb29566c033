"""``staleflow run``: every role of a run on this machine, under one supervisor."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli import options
from staleflow.cli.progress import working

if TYPE_CHECKING:
    from staleflow.configs.schema import Config
    from staleflow.supervisor.summary import Summary
    from staleflow.supervisor.view import View


@click.command("run")
@click.argument("arguments", nargs=-1, metavar="CONFIG [KEY=VALUE]...", shell_complete=options.complete_run)
@options.config_file
@click.option("--run-dir", type=options.DIRECTORY, metavar="DIR", help="Default: runs/NAME-TIMESTAMP.")
@options.insecure
@click.option("--resume", is_flag=True, help="Continue the run in --run-dir or CONFIG (default: the newest of CONFIG).")
@click.option("--plain", is_flag=True, help="Print a line every few seconds instead of the live view.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON; progress goes to stderr.")
def command(
    arguments: tuple[str, ...],
    config_file: Path | None,
    run_dir: Path | None,
    insecure: bool,
    resume: bool,
    plain: bool,
    as_json: bool,
) -> int:
    """Start every role of CONFIG on this machine and train.

    Each role is a separate process; Ctrl-C stops all of them cleanly. KEY=VALUE overrides a key of the configuration,
    for example staleness.max_staleness=0. --config is another way to give CONFIG. With --resume, CONFIG may be a run
    directory, and only trainer.steps, nproc, backend and gpus, and the number of rollout workers may change.

    \b
    Examples:
      staleflow run configs/quickstart.toml
      staleflow run configs/quickstart.toml staleness.max_staleness=0 trainer.steps=50
      staleflow run configs/quickstart.toml preset=areal
      staleflow run --resume runs/quickstart-20261121-053000
      staleflow run --resume runs/quickstart-20261121-053000 trainer.steps=300
    """
    from staleflow.configs.loading.presence import present
    from staleflow.configs.loading.probe import count_gpus
    from staleflow.configs.placement import place
    from staleflow.configs.pools import at_most
    from staleflow.configs.threads import share
    from staleflow.process.host import usable_cores
    from staleflow.supervisor import rundir, summary
    from staleflow.supervisor.addresses import check_free
    from staleflow.supervisor.mirror import check_access
    from staleflow.supervisor.supervisor import Supervisor

    if resume and run_dir is None and arguments and Path(arguments[0]).is_dir():
        run_dir, arguments = Path(arguments[0]), arguments[1:]
    config = _config((*arguments, *options.INSECURE[: int(insecure)]), config_file, run_dir, resume)
    folder = rundir.choose(config, run_dir, resume=resume)
    if resume and (finished := summary.finished(folder, config.trainer.steps)) is not None:
        return report_finished(finished, config, as_json)
    with working("checking the configuration's imports"):
        present(config)
        gpus = count_gpus()
    if not resume:  # a run that has begun continues without its mirror
        check_access(config)
    check_free(config, folder)
    for gpu, names in place(at_most(config), gpus).table() if gpus else ():
        click.echo(f"GPU {gpu}: {', '.join(names)}", err=True)
    if chosen := share(at_most(config), usable_cores()).words(config):
        click.echo(f"threads: {chosen} ({usable_cores()} cores)", err=True)
    print_memory(at_most(config), folder, gpus)
    hint = f"staleflow run --run-dir {folder} --resume"
    with rundir.claim(config, folder, resume=resume, command=hint):
        return Supervisor(config, folder, view_of(config, folder, plain, as_json), hint, gpus=gpus).run()


def print_memory(config: "Config", folder: Path, gpus: int) -> None:
    """Print the memory plan of a run with a large model that is already there. It never stops the run."""
    from staleflow.configs.errors import ConfigError
    from staleflow.configs.rules.checks import needs_model
    from staleflow.supervisor.memory import ask, text

    try:
        directory = ask.model_directory(config, folder) if needs_model(config) else None
        if directory is None or not ask.is_large(directory):
            return
        with working("planning the memory"):
            plan = ask.plan_of(config, directory, gpus)
    except ConfigError as error:
        click.echo(f"no memory plan: {error}", err=True)
        return
    for line in text.lines(config, plan):
        click.echo(line, err=True)


def _config(arguments: tuple[str, ...], file: Path | None, run_dir: Path | None, resume: bool) -> "Config":
    from staleflow.configs.loading.load import load, read_run, resumed

    if file is None and arguments and "=" not in arguments[0]:
        file, arguments = Path(arguments[0]), arguments[1:]
    if file is not None and file.is_dir():
        raise click.UsageError(f"{file} is a directory; to continue the run in it: staleflow run --resume {file}")
    if file is not None:
        return load(file, arguments)
    if resume and run_dir is not None:
        return resumed(read_run(run_dir), arguments)
    if resume:
        raise click.UsageError("no run given; for example: staleflow run --resume runs/quickstart-20261121-053000")
    raise click.UsageError("no configuration given; for example: staleflow run configs/quickstart.toml")


def report_finished(finished: "Summary", config: "Config", as_json: bool, command: str = "staleflow run") -> int:
    """Print that there is nothing to resume and how ``command`` adds steps. Return the exit code."""
    from staleflow.process.sanitize import json_line
    from staleflow.supervisor.summary import how_to_continue

    click.echo(how_to_continue(finished, config, command), err=as_json)
    if as_json:
        click.echo(json_line(finished))
    return 0


def view_of(config: "Config", folder: Path, plain: bool, as_json: bool) -> "View":
    """Return the view for this terminal, wrapped by the configured metric writers."""
    from staleflow.report.writers import with_writers

    return with_writers(_terminal_view(config, folder, plain, as_json), config, folder)


def _terminal_view(config: "Config", folder: Path, plain: bool, as_json: bool) -> "View":
    import sys

    from rich.console import Console

    from staleflow.monitor.live import LiveView
    from staleflow.monitor.plain import PlainView

    if as_json:
        return PlainView(sys.stderr, config.name, summary_to=sys.stdout, run_dir=folder)
    if plain or not sys.stdout.isatty() or Console().is_dumb_terminal:
        return PlainView(sys.stdout, config.name, run_dir=folder)
    return LiveView(config.name, folder)
