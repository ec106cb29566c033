"""``staleflow chaos``: harm a run on purpose, to watch it survive."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.supervisor.chaos import Done

KINDS = ("kill", "stop", "term", "flip")


@click.command("chaos", short_help="Kill, stop and damage processes of a run, to watch it survive.")
@click.argument("run_dir", type=options.DIRECTORY)
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="What is done; several: each in turn.")
@click.option("--only", multiple=True, metavar="NAME", help="Spare others: rollout-0, trainer, ... or a beginning.")
@click.option(
    "--every", default=5.0, show_default=True, type=click.FloatRange(min=0.1), metavar="S", help="Seconds, on average."
)
@click.option("--faults", default=10, show_default=True, type=click.IntRange(min=1), metavar="N", help="How many.")
@click.option(
    "--stop-for",
    type=click.FloatRange(min=0.1),
    metavar="S",
    help="Seconds that a process is stopped.  [default: its lease and two]",
)
@click.option("--seed", default=0, show_default=True, metavar="N", help="Of who is harmed, how and when.")
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
    """Harm the processes of the run in RUN_DIR, one after another, and say what was done to whom.

    kill is SIGKILL; stop is SIGSTOP, and SIGCONT later; term is SIGTERM; flip turns one bit of a stored trajectory.
    Without --kind all of them, in a shuffled order. `staleflow run` starts again whatever ends. Watch with
    `staleflow status RUN_DIR`; prove with `staleflow trace check RUN_DIR`.

    Exit code 1 when the run was over before all was done.

    \b
    Examples:
      staleflow chaos runs/mine --faults 20 --every 5
      staleflow chaos runs/mine --kind kill --only trainer --faults 1
    """
    if kinds and "stop" not in kinds:
        options.refuse("only --kind stop takes it", "stop_for")
    from staleflow.configs.loading.load import read_run
    from staleflow.supervisor.chaos import Chaos, Kind, victims

    config = read_run(run_dir)
    if not (there := [victim.name for victim in victims(run_dir)]):
        raise ConfigError("run directory", str(run_dir), "no process of this run is here: start it first")
    for name in only:
        if not any(victim.startswith(name) for victim in there):
            raise ConfigError("--only", name, f"this run has {', '.join(there)}")
    chaos = Chaos(
        run_dir,
        kinds=[Kind(kind) for kind in kinds or KINDS],
        only=only,
        every_s=every,
        stop_s=stop_for or config.scheduler.lease_s + 2.0,
        seed=seed,
        tell=_tell_json if as_json else _tell,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: who is stopped goes on first
    done = chaos.run(faults)
    if done < faults:
        click.echo(f"staleflow: the run was over after {done} of {faults} faults", err=True)
    return int(done < faults)


def _tell(fault: "Done") -> None:
    click.echo(str(fault))


def _tell_json(fault: "Done") -> None:
    import msgspec

    click.echo(msgspec.json.encode(fault).decode())
