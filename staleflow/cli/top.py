"""``staleflow top``: a run, live or replayed."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.monitor.sources import Live, Replay

POLL_INTERVAL_S = 0.25
"""Between two looks at whether a run that is being started can be asked."""


@click.command("top", short_help="Watch a run, live or replayed.")
@click.argument("run_dir", type=options.DIRECTORY, required=False)
@options.connect
@click.option("--replay", is_flag=True, help="Show what trace.jsonl of RUN_DIR tells, from its beginning.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0.1, max=1000.0),
    metavar="X",
    help="Of the replay, in seconds of the run a second.  [default: 1]",
)
@click.option("--once", "only_once", is_flag=True, help="One picture, then leave.")
@options.as_json
def command(
    run_dir: Path | None, connect: str | None, replay: bool, speed: float | None, only_once: bool, as_json: bool
) -> int:
    """Watch the run in RUN_DIR (default: the newest of runs/), or the one whose scheduler is at --connect.

    On a terminal a screen that is driven by keys; else a line every few seconds. RUN_DIR may also be a trace file, with
    --replay. Looking on changes nothing: leave and come back at any time.

    \b
    Examples:
      staleflow top runs/mine                       a run that goes on; ? lists the keys
      staleflow top --connect tcp://10.0.0.7:5555   the same from another machine
      staleflow top runs/mine --replay --speed 10   a run again, ten times as fast
      staleflow top runs/mine --once                one picture, for a log or a mail
      staleflow top runs/mine --json | jq .why      an object a second, for a script
    """
    import signal

    from staleflow.monitor.top import answering, show

    if run_dir is not None and connect is not None:
        raise click.UsageError("which run? Give RUN_DIR or --connect ADDRESS")
    if replay and connect is not None:
        raise click.UsageError("--replay reads a trace: give RUN_DIR, not --connect")
    if speed is not None and not replay:
        raise click.UsageError("--speed is of a replay: add --replay")
    if speed is not None and only_once:
        raise click.UsageError("--speed is of a replay that moves: --once shows its end")
    run_dir = options.run_meant(run_dir) if connect is None else None
    signal.signal(signal.SIGTERM, _leave)
    if replay and run_dir is not None:
        with _replay(run_dir) as source:
            show(source, as_json=as_json, only_once=only_once, speed=speed or 1.0)
        return 0
    with answering(_live(run_dir, connect)) as live:
        show(live, as_json=as_json, only_once=only_once, speed=None)
    return 0


def _leave(number: int, frame: object) -> None:
    """A screen of its own is given back before the process ends."""
    raise KeyboardInterrupt


def _replay(given: Path) -> "Replay":
    from staleflow.configs.loading.load import read_run
    from staleflow.monitor.sources import Replay

    trace = given / "trace.jsonl" if given.is_dir() else given
    if not trace.is_file():
        raise ConfigError("trace", str(trace), "no such file")
    try:
        steps = read_run(trace.parent).trainer.steps
    except ConfigError:  # a trace alone, or with the configuration of an older staleflow, is told all the same
        steps = 0
    return Replay(trace, steps)


def _live(run_dir: Path | None, connect: str | None) -> "Live":
    from staleflow.configs.loading.load import addresses, read_run
    from staleflow.monitor.sources import Live
    from staleflow.net.security import OBSERVER_ROLES, client_sockets
    from staleflow.supervisor.addresses import may_answer, nobody
    from staleflow.supervisor.rundir import died, holder, without_scheduler

    config = options.read_within(run_dir, lambda: read_run(run_dir)) if run_dir else None
    address = connect or (addresses(config, run_dir).scheduler if config and run_dir else "")
    if run_dir is not None and not options.read_within(run_dir, lambda: may_answer(address)):
        wait_for_start(run_dir, address)
    if run_dir is not None and not may_answer(address):
        if (process := holder(run_dir)) is not None:
            raise ConfigError("scheduler", address, without_scheduler(run_dir, process))
        ended = died(run_dir) or nobody(address)
        allowed = f"nobody listens there: {ended}. Again: staleflow top {run_dir} --replay"
        raise ConfigError("scheduler", address, allowed)
    return Live(address, run_dir, transport=client_sockets(config.security if config else None, *OBSERVER_ROLES))


def wait_for_start(run_dir: Path, address: str) -> None:
    """On a terminal: until the scheduler of a run that is being started can be asked, or the process that starts it is
    gone. A model may take minutes."""
    import sys
    import time

    from rich.console import Console

    from staleflow.supervisor.addresses import may_answer
    from staleflow.supervisor.rundir import holder

    process = holder(run_dir)
    if process is None or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return
    with Console(stderr=True).status(f"process {process} starts the run; Ctrl-C leaves"):
        while holder(run_dir) is not None and not may_answer(address):
            time.sleep(POLL_INTERVAL_S)
