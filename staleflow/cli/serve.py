"""``staleflow serve``: run one server in this terminal."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.configs.schema import Config


@click.command("serve", short_help="Run one server in this terminal.")
@click.argument("what", type=click.Choice(["scheduler", "trajectories", "parameters"]))
@options.overrides
@options.config_file
@click.option(
    "--run-dir", type=options.DIRECTORY, metavar="DIR", required=True, help="Run directory, created if missing."
)
@options.insecure
@click.option("--resume", is_flag=True, help="scheduler: continue a run that was drained or has ended.")
@click.option("--session", metavar="ID", hidden=True)
@click.option("--shard", type=int, metavar="N", default=0, show_default=True, help="Which trajectory server this is.")
def command(
    what: str,
    overrides: tuple[str, ...],
    config_file: Path | None,
    run_dir: Path,
    insecure: bool,
    resume: bool,
    session: str | None,
    shard: int,
) -> int:
    """Run one server: the scheduler, one trajectory server (shard), or the parameter server.

    The first process of a run directory needs --config; the others read it from the directory. SIGTERM or Ctrl-C
    stops this server; the run continues when it is started again. A run that was drained or has ended remains so until
    its scheduler is started with --resume, which may change trainer.steps, nproc, backend and gpus.

    \b
    Examples:
      staleflow serve scheduler --run-dir runs/mine --config configs/quickstart.toml
      staleflow serve trajectories --run-dir runs/mine --shard 0
      staleflow serve parameters --run-dir runs/mine
      staleflow serve scheduler --run-dir runs/mine --resume trainer.steps=300
    """
    import secrets

    from staleflow.configs.loading.load import read_run, resumed
    from staleflow.supervisor import lifeline, rundir, summary

    lifeline.watch_supervisor()
    overrides = (*overrides, *options.INSECURE[: int(insecure)])
    if what != "scheduler":
        options.refuse("only the scheduler accepts it; the other servers follow the scheduler", "resume", "session")
    if resume and config_file is None:
        config = resumed(read_run(run_dir), overrides)
        rundir.choose(config, run_dir, resume=True)
        rundir.adopt(config, run_dir)
        summary.forget(run_dir)
    else:
        config = options.run_config(config_file, overrides, run_dir, lambda config: _check(config, what, shard))
    _check(config, what, shard)
    match what:
        case "scheduler":
            from staleflow.servers.scheduler import main as scheduler

            return scheduler.serve(config, run_dir, session or (secrets.token_hex(8) if resume else ""))
        case "trajectories":
            from staleflow.servers.trajectories import main as trajectories

            return trajectories.serve(config, run_dir, shard)
        case _:
            from staleflow.servers.parameters import main as parameters

            return parameters.serve(config, run_dir)


def _check(config: "Config", what: str, shard: int) -> None:
    if what != "trajectories" and shard:
        raise ConfigError("--shard", shard, "only trajectories have shards")
    if not 0 <= shard < config.trajectories.shards:
        raise ConfigError("--shard", shard, f"trajectories.shards is {config.trajectories.shards}")
