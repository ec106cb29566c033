"""``staleflow status``: print the state of a run once."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staleflow.cli import options

if TYPE_CHECKING:
    from staleflow.protocols.wire.messages import SchedulerStatus
    from staleflow.supervisor.summary import Summary


@click.command("status", short_help="Print the state of a run, and why it waits.")
@click.argument("run_dir", type=options.DIRECTORY, required=False)
@options.connect
@click.option("--why", is_flag=True, help="Print only why the run waits.")
@options.as_json
def command(run_dir: Path | None, connect: str | None, why: bool, as_json: bool) -> int:
    """Print the state of the run in RUN_DIR (default: the newest of runs/), or of the scheduler at --connect.

    For a run that has ended, print its summary. The exit code is 1 if the run failed, was interrupted or died, or if
    the scheduler does not answer. `phase` in the output of --json is one of starting, running, draining, finished,
    drained, failed, interrupted, died.

    \b
    Examples:
      staleflow status
      staleflow status runs/mine
      staleflow status runs/mine --why
      staleflow status --connect tcp://10.0.0.7:5551 --json
    """
    from staleflow.clients.admin import Admin
    from staleflow.monitor.sources import phase_of
    from staleflow.net.errors import Unavailable
    from staleflow.net.security import OBSERVER_ROLES, client_sockets
    from staleflow.protocols.wire.messages import SchedulerStatus, Status
    from staleflow.protocols.wire.messages.status import as_dict
    from staleflow.supervisor.addresses import may_answer

    run_dir, config, address = options.scheduler_of(run_dir, connect)
    if run_dir is not None and not options.read_within(run_dir, lambda: may_answer(address)):
        return options.read_within(run_dir, lambda: _ended(run_dir, address, why, as_json))
    try:
        sockets = client_sockets(config.security if config else None, *OBSERVER_ROLES)
        with Admin(address, "status", transport=sockets) as admin:
            status = admin.status_of(Status if as_json else SchedulerStatus, timeout_s=3.0)
    except Unavailable:
        if run_dir is not None:
            return options.read_within(run_dir, lambda: _ended(run_dir, address, why, as_json, listening=True))
        return _ended(run_dir, address, why, as_json, listening=True)
    run = status if isinstance(status, SchedulerStatus) else SchedulerStatus()
    if as_json:
        _print_json({"phase": phase_of(run), **as_dict(status)})
    elif why:
        _why(run)
    else:
        _show(run, run_dir)
    return 0


def _show(status: "SchedulerStatus", run_dir: Path | None) -> None:
    from rich.console import Console

    from staleflow.metrics.reader import metric_lines
    from staleflow.monitor.history import History
    from staleflow.monitor.look import Look
    from staleflow.monitor.model import board
    from staleflow.monitor.panels import WHY_ROWS, why_rows
    from staleflow.monitor.screen import dashboard
    from staleflow.monitor.sources import phase_of
    from staleflow.process.hung_files import READ_TIMEOUT_S, within
    from staleflow.supervisor.view import Snapshot

    lines: tuple[dict[str, Any], ...] = ()
    if run_dir is not None:
        try:
            lines = tuple(within(READ_TIMEOUT_S, lambda: metric_lines(run_dir / "metrics.jsonl")))
        except TimeoutError:
            click.echo(
                f"staleflow: no curves: reading {run_dir}/metrics.jsonl took over {READ_TIMEOUT_S:g} s",
                err=True,
            )
    phase = phase_of(status)
    snapshot = Snapshot(phase=phase, elapsed_s=status.run_s, status=status, lines=lines, unix_s=time.time())
    history = History()
    history.see(snapshot)
    console = Console(highlight=False)
    it = board(run_dir.resolve().name if run_dir else status.run, snapshot, history)
    height = 11 + min(max(len(it.ages), len(it.window), 3) + 4, 9) + max(len(it.roles), 3)
    height += why_rows(it, console.width, height) - WHY_ROWS
    console.print(dashboard(it, Look(tab="processes"), console.width, height))


def _why(status: "SchedulerStatus") -> None:
    """Print why the run waits, one line for each group that it waits for, and the recommended number of engines."""
    from staleflow.monitor.rows import pins
    from staleflow.monitor.words import span
    from staleflow.process.sanitize import all_printable

    status = all_printable(status)
    click.echo(status.error or status.why or "nothing waits")
    for pin in pins(status):
        so_far = "" if pin.so_far_s is None else f", for {span(pin.so_far_s)} so far"
        left = "" if pin.left_s is None else f", about {span(pin.left_s)} left"
        click.echo(f"  step {pin.step}: group {pin.group} of version {pin.version}, at {pin.where}{so_far}{left}")
    if status.recommendation.sentence and not status.finished:
        click.echo(f"recommendation: {status.recommendation.sentence}")


def _ended(run_dir: Path | None, address: str, why: bool, as_json: bool, *, listening: bool = False) -> int:
    """Print how a run ended, or why its scheduler does not answer. Return the exit code.

    ``listening``: a connection was possible, but the scheduler sent no reply.
    """
    import dataclasses

    import msgspec

    from staleflow.process.sanitize import printable
    from staleflow.supervisor import rundir, summary
    from staleflow.supervisor.addresses import no_listener, silence

    process = rundir.holder(run_dir) if run_dir else None
    if listening and run_dir is not None and (why_silent := silence(address)):
        return _no_answer(f"the scheduler at {address} does not answer: {why_silent}")
    if run_dir is not None and process is not None:
        return _no_answer(rundir.without_scheduler(run_dir, process), as_json)
    result: Summary | None = summary.read(run_dir) if run_dir else None
    if result is None and run_dir is not None and not listening and (died := rundir.died(run_dir)) is not None:
        if as_json:
            _print_json({"phase": "died", **dataclasses.asdict(died)})
        click.echo(printable(f"staleflow: {died}"), err=True)
        return 1
    if result is None:
        silent = "it cannot be reached from here, or the run has ended" if listening else no_listener(address)
        return _no_answer(f"the scheduler at {address} does not answer: {silent}")
    if as_json:
        _print_json({"phase": result.outcome, **msgspec.structs.asdict(result)})
    elif why:
        click.echo(printable(_outcome(result, run_dir)))
    else:
        from rich.console import Console

        from staleflow.monitor.ending import print_summary

        print_summary(result, Console(highlight=False))
        if result.resume:
            click.echo(printable(f"resume with: {result.resume}"))
    return 0 if result.good else 1


def _outcome(result: "Summary", run_dir: Path | None) -> str:
    """Return one sentence on why the run ended and what to do next."""
    from staleflow.monitor.words import plural

    steps = f"{result.steps:,} of {result.steps_wanted:,} steps trained"
    resume = f"; resume with: {result.resume}" if result.resume else ""
    if result.good:
        return f"the run finished: {steps}" if result.outcome == "finished" else f"the run was drained: {steps}{resume}"
    if result.violations:
        return f"{plural(result.violations, 'violation')} in its trace: staleflow trace check {run_dir}; {steps}"
    how = f"failed: {result.error}" if result.outcome == "failed" else "was interrupted"
    return f"the run {how}; {steps}{resume}"


def _no_answer(why: str, starting: bool = False) -> int:
    """Print ``why`` to stderr and return 1; with ``starting``, also print the phase as JSON for scripts that wait."""
    if starting:
        _print_json({"phase": "starting"})
    click.echo(f"staleflow: {why}", err=True)
    return 1


def _print_json(values: object) -> None:
    from staleflow.process.sanitize import json_line

    click.echo(json_line(values))
