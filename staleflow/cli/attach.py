"""``staleflow attach``: run one worker in this terminal."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.configs.schema import Config

ROLE_OPTIONS = {
    "stage": ("stage", "a stage worker"),
    "nproc": ("train", "the trainer"),
    "bind": ("relay", "a relay"),
    "mb_per_s": ("relay", "a relay"),
}
"""Options that only one role accepts: the role, and its name in error messages."""


@click.command("attach", short_help="Attach one worker to a run.")
@click.argument("role", type=click.Choice(["rollout", "stage", "train", "relay"]))
@options.overrides
@options.connect
@options.run_dir
@options.config_file
@click.option("--stage", metavar="NAME", default="reward", show_default=True, help="Stage that a stage worker serves.")
@click.option(
    "--nproc",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Trainer ranks on this machine (default: trainer.nproc). Under torchrun, leave it out.",
)
@click.option("--bind", metavar="ADDRESS", help="Address on which a relay listens. Default: a free loopback port.")
@click.option(
    "--mb-per-s",
    type=click.FloatRange(min=0.0),
    default=0.0,
    metavar="MB",
    help="Maximum download rate of a relay, in 10^6 bytes per second. Default: unlimited.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Default: generated. The name of a live worker is rejected; that of a silent one is taken over.",
)
def command(
    role: str,
    overrides: tuple[str, ...],
    connect: str | None,
    run_dir: Path | None,
    config_file: Path | None,
    stage: str,
    nproc: int | None,
    bind: str | None,
    mb_per_s: float,
    name: str | None,
) -> int:
    """Attach a worker to a run: a rollout engine, a stage worker (reward, or --stage), the trainer, or a relay, which
    distributes weights to nearby workers.

    On the machine of the run, --run-dir is enough; with --connect the scheduler supplies everything else, also the
    configuration. KEY=VALUE gives a rollout engine settings of its own: rollout.engine, rollout.max_inflight,
    rollout.vllm and similar keys. The worker waits for servers that have not started yet. If the run has ended, the
    worker exits with the run's outcome.

    \b
    Examples:
      staleflow attach rollout --run-dir runs/mine
      staleflow attach rollout --connect tcp://10.0.0.1:5551
      staleflow attach rollout --connect tcp://10.0.0.1:5551 rollout.engine=vllm rollout.max_inflight=256
      staleflow attach stage --stage judge --run-dir runs/mine
      staleflow attach train --run-dir runs/mine --nproc 8
    """
    import threading

    from staleflow.clients.attachment import NOTICE_DELAY_S
    from staleflow.configs.loading.load import RESOLVED, addresses, read_run
    from staleflow.configs.loading.presence import check_packages
    from staleflow.net.errors import RunOver
    from staleflow.process.readiness import slot
    from staleflow.supervisor import lifeline
    from staleflow.supervisor.joining import check_not_ended, generated_name, join_run, settings_of
    from staleflow.supervisor.rundir import check_owner

    for option, (owner, called) in ROLE_OPTIONS.items():
        if owner != role:
            options.refuse(f"only {called} accepts it", option)
    watched = lifeline.watch_supervisor()
    name = name or generated_name(role, stage)
    if name in (".", "..") or Path(name).name != name:
        raise ConfigError("--name", name, "files are named after it: use a name without slashes, other than . and ..")
    if run_dir is not None:
        if (run_dir / RESOLVED).is_file():
            check_owner(run_dir)
            config = settings_of(read_run(run_dir), role, config_file, overrides, f"the run in {run_dir}")
        else:
            config = options.run_config(config_file, overrides, run_dir)
        scheduler = connect or addresses(config, run_dir).scheduler
        if not slot():
            check_not_ended(run_dir, scheduler)
    elif connect is not None:
        waiting = f"staleflow: waiting for the scheduler at {connect}: no answer yet"
        notice = threading.Timer(NOTICE_DELAY_S, click.echo, (waiting,), {"err": True})
        notice.daemon = True
        notice.start()
        try:
            config, run_dir = join_run(connect, role, config_file, overrides)
        except RunOver as over:
            click.echo(f"staleflow: {over}", err=True)
            return 0
        finally:
            notice.cancel()
        scheduler = connect
    else:
        raise click.UsageError("no run given: add --run-dir DIR or --connect ADDRESS")
    if role == "relay":
        return _relay(config, run_dir, name, scheduler, bind, mb_per_s)
    check_packages(config, role, stage)
    if role == "train" and (ranks := _ranks(config, nproc)) > 1:
        return _launch(config, run_dir, name, scheduler, ranks, watched=watched)
    return _attach(role, config, run_dir, name, scheduler, stage, watched=watched)


def _relay(config: "Config", run_dir: Path, name: str, scheduler: str, bind: str | None, mb_per_s: float) -> int:
    from staleflow.servers.parameters.relay import main as relay

    return relay.attach(config, run_dir, name, scheduler, bind or relay.BIND, mb_per_s)


def _ranks(config: "Config", requested: int | None) -> int:
    """Return the number of ranks to start; 1 if this process is a rank already."""
    from staleflow.configs.ranks import launched, place
    from staleflow.configs.rules.checks import check_ranks

    nproc = place().world if launched() else requested or config.trainer.nproc
    if requested not in (None, nproc):
        raise ConfigError("--nproc", requested, f"torchrun has started {nproc} ranks already: leave out --nproc")
    check_ranks(config, nproc)
    return 1 if launched() else nproc


def _launch(config: "Config", run_dir: Path, name: str, scheduler: str, nproc: int, *, watched: bool) -> int:
    from staleflow.supervisor.launch import launch
    from staleflow.supervisor.model import ensure

    ensure(config, run_dir)  # download once here instead of in every rank
    command = (sys.executable, "-m", "staleflow.cli", "attach", "train", "--run-dir", str(run_dir))
    return launch((*command, "--connect", scheduler, "--name", name), nproc, watched=watched)


def _attach(role: str, config: "Config", run_dir: Path, name: str, scheduler: str, stage: str, *, watched: bool) -> int:
    from staleflow.supervisor.model import ensure

    ensure(config, run_dir)
    match role:
        case "rollout":
            from staleflow.clients.rollout import main as rollout

            return rollout.attach(config, run_dir, name, scheduler, supervised=watched)
        case "stage":
            from staleflow.clients.stage import main as stages

            return stages.attach(config, run_dir, name, scheduler, stage)
        case _:
            from staleflow.clients.trainer import main as trainer

            return trainer.attach(config, run_dir, name, scheduler)
