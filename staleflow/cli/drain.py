"""``staleflow drain``: end a run early without losing work."""

from pathlib import Path

import click

from staleflow.cli import options


@click.command("drain", short_help="End a run early; what is under way is still trained and saved.")
@click.argument("run_dir", type=options.DIRECTORY, required=False)
@options.connect
@click.option("--why", metavar="TEXT", default="asked by the operator", help="Reason, for status and the log.")
def command(run_dir: Path | None, connect: str | None, why: str) -> int:
    """Drain the run in RUN_DIR (default: the newest of runs/), or the one whose scheduler is at --connect.

    Nothing new is leased; groups under way finish, full batches are trained, the trainer saves a checkpoint, and every
    worker exits with 0. Returns as soon as the scheduler has stored the drain. --resume continues a drained run.

    \b
    Examples:
      staleflow drain runs/mine
      staleflow drain --connect tcp://10.0.0.7:5555 --why "maintenance"
    """
    from staleflow.clients.admin import Admin
    from staleflow.configs.loading.load import addresses, read_run
    from staleflow.monitor.sources import phase_of
    from staleflow.net.permissions import Role
    from staleflow.net.security import client_sockets
    from staleflow.supervisor.joining import check_not_ended

    if run_dir is not None and connect is not None:
        raise click.UsageError("which run? Give RUN_DIR or --connect ADDRESS")
    config, address = None, connect or ""
    if connect is None:
        folder = options.run_meant(run_dir)
        config = options.read_within(folder, lambda: read_run(folder))
        address = addresses(config, folder).scheduler
        options.read_within(folder, lambda: check_not_ended(folder, address))
    sockets = client_sockets(config.security if config else None, Role.ADMIN)
    with Admin(address, "drain", transport=sockets) as admin:
        admin.drain(why)
        phase = phase_of(admin.status())
    drains = phase == "draining"
    said = "it drains; staleflow status --why says what is left" if drains else f"nothing to drain: {phase}"
    click.echo(f"the run at {address}: {said}")
    return 0
