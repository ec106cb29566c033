"""``staleflow top``: watch a run, live or replayed from its trace."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.configs.schema import Config
    from staleflow.monitor.sources import Live, Replay

POLL_INTERVAL_S = 0.25
"""Seconds between two checks whether the scheduler of a starting run listens."""


@click.command("top", short_help="Watch a run, live or replayed.")
@click.argument("run_dir", type=options.DIRECTORY, required=False)
@options.connect
@click.option("--replay", is_flag=True, help="Replay trace.jsonl of RUN_DIR from its beginning.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0.1, max=1000.0),
    metavar="X",
    help="Replay speed, in seconds of the run per second.  [default: 1]",
)
@click.option("--once", "only_once", is_flag=True, help="Print one screen, then exit.")
@options.as_json
def command(
    run_dir: Path | None, connect: str | None, replay: bool, speed: float | None, only_once: bool, as_json: bool
) -> int:
    """Watch the run in RUN_DIR (default: the newest of runs/), or the one whose scheduler is at --connect.

    A terminal shows an interactive screen; any other output gets a line every few seconds. With --replay, RUN_DIR may
    also be a trace file. The command is read-only: it may be stopped and restarted at any time.

    \b
    Examples:
      staleflow top runs/mine                       a running run; ? lists the keys
      staleflow top --connect tcp://10.0.0.7:5551   the same from another machine
      staleflow top runs/mine --replay --speed 10   a replay, ten times as fast
      staleflow top runs/mine --once                one screen, for a log or a mail
      staleflow top runs/mine --json | jq .why      one object per second, for a script
    """
    import signal

    from staleflow.monitor.top import answering, show

    if replay and connect is not None:
        raise click.UsageError("--replay reads a trace: give RUN_DIR, not --connect")
    if speed is not None and not replay:
        raise click.UsageError("--speed applies to a replay only: add --replay")
    if speed is not None and only_once:
        raise click.UsageError("--speed has no effect with --once, which shows the replay's end")
    signal.signal(signal.SIGTERM, _leave)
    if replay:
        with _replay(options.choose_run_dir(run_dir)) as source:
            show(source, as_json=as_json, only_once=only_once, speed=speed or 1.0)
        return 0
    with answering(_live(*options.scheduler_of(run_dir, connect))) as live:
        show(live, as_json=as_json, only_once=only_once, speed=None)
    return 0


def _leave(number: int, frame: object) -> None:
    """Turn SIGTERM into ``KeyboardInterrupt``, so that the terminal's main screen is restored before the exit."""
    raise KeyboardInterrupt


def _replay(given: Path) -> "Replay":
    from staleflow.configs.loading.load import read_run
    from staleflow.monitor.sources import Replay

    trace = given / "trace.jsonl" if given.is_dir() else given
    if not trace.is_file():
        raise ConfigError("trace", str(trace), "no such file")
    try:
        steps = read_run(trace.parent).trainer.steps
    except ConfigError:  # replay without a step total: a lone trace, or the configuration of an older staleflow
        steps = 0
    return Replay(trace, steps)


def _live(run_dir: Path | None, config: "Config | None", address: str) -> "Live":
    from staleflow.monitor.sources import Live
    from staleflow.net.security import OBSERVER_ROLES, client_sockets
    from staleflow.supervisor.addresses import may_answer, no_listener
    from staleflow.supervisor.rundir import died, holder, without_scheduler

    if run_dir is not None and not options.read_within(run_dir, lambda: may_answer(address)):
        wait_for_start(run_dir, address)
    if run_dir is not None and not may_answer(address):
        if (process := holder(run_dir)) is not None:
            raise ConfigError("scheduler", address, without_scheduler(run_dir, process))
        ended = died(run_dir) or no_listener(address)
        allowed = f"no process listens there: {ended}. To replay it: staleflow top {run_dir} --replay"
        raise ConfigError("scheduler", address, allowed)
    return Live(address, run_dir, transport=client_sockets(config.security if config else None, *OBSERVER_ROLES))


def wait_for_start(run_dir: Path, address: str) -> None:
    """Wait until the scheduler of a starting run listens or its supervisor exits; return at once without a terminal.

    Loading a model may take minutes.
    """
    import sys
    import time

    from rich.console import Console

    from staleflow.supervisor.addresses import may_answer
    from staleflow.supervisor.rundir import holder

    process = holder(run_dir)
    if process is None or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return
    with Console(stderr=True).status(f"process {process} is starting the run; Ctrl-C to stop waiting"):
        while holder(run_dir) is not None and not may_answer(address):
            time.sleep(POLL_INTERVAL_S)
