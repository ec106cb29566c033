"""``staleflow chaos``: inject faults into a run."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.supervisor.chaos import Injected

KINDS = ("kill", "stop", "term", "flip")


@click.command("chaos", short_help="Inject faults: kill or stop processes, flip stored bits.")
@click.argument("run_dir", type=options.DIRECTORY)
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(KINDS),
    multiple=True,
    help="Fault to inject; repeatable.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Only processes whose name starts with NAME; repeatable.",
)
@click.option(
    "--every",
    default=5.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    metavar="S",
    help="Mean time between faults.",
)
@click.option("--faults", default=10, show_default=True, type=click.IntRange(min=1), metavar="N", help="Fault count.")
@click.option(
    "--stop-for",
    type=click.FloatRange(min=0.1),
    metavar="S",
    help="Seconds that a process stays stopped.  [default: scheduler.lease_s + 2]",
)
@click.option("--seed", default=0, show_default=True, metavar="N", help="Seed for the choice of target, kind and time.")
@options.as_json
def command(
    run_dir: Path,
    kinds: tuple[str, ...],
    only: tuple[str, ...],
    every: float,
    faults: int,
    stop_for: float | None,
    seed: int,
    as_json: bool,
) -> int:
    """Inject faults into the processes of the run in RUN_DIR, one at a time, and print each fault.

    kill is SIGKILL; stop is SIGSTOP followed by SIGCONT; term is SIGTERM; flip inverts one bit of a stored trajectory.
    Without --kind, all four in shuffled order. `staleflow run` restarts the processes that end. Watch with
    `staleflow status RUN_DIR`; verify with `staleflow trace check RUN_DIR`.

    The exit code is 1 if the run ended before all faults were injected.

    \b
    Examples:
      staleflow chaos runs/mine --faults 20 --every 5
      staleflow chaos runs/mine --kind kill --only trainer --faults 1
    """
    if kinds and "stop" not in kinds:
        options.refuse("only --kind stop accepts it", "stop_for")
    from staleflow.configs.loading.load import read_run
    from staleflow.supervisor.chaos import Chaos, Kind, victims

    config = read_run(run_dir)
    if not (names := [victim.name for victim in victims(run_dir)]):
        raise ConfigError("run directory", str(run_dir), "no process of this run found on this machine: start the run")
    for name in only:
        if not any(victim.startswith(name) for victim in names):
            raise ConfigError("--only", name, f"this run has {', '.join(names)}")
    chaos = Chaos(
        run_dir,
        kinds=[Kind(kind) for kind in kinds or KINDS],
        only=only,
        every_s=every,
        stop_s=stop_for or config.scheduler.lease_s + 2.0,
        seed=seed,
        report=_print_json if as_json else _print,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: continue a stopped process first
    injected = chaos.run(faults)
    if injected < faults:
        click.echo(f"staleflow: the run ended after {injected} of {faults} faults", err=True)
    return int(injected < faults)


def _print(fault: "Injected") -> None:
    click.echo(str(fault))


def _print_json(fault: "Injected") -> None:
    import msgspec

    click.echo(msgspec.json.encode(fault).decode())
