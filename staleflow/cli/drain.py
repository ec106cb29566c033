"""``staleflow drain``: stop a run early without losing work."""

from pathlib import Path

import click

from staleflow.cli import options


@click.command("drain", short_help="Stop a run early: finish groups, train full batches, save.")
@click.argument("run_dir", type=options.DIRECTORY, required=False)
@options.connect
@click.option("--why", metavar="TEXT", default="asked by the operator", help="Reason, shown by status and in the log.")
def command(run_dir: Path | None, connect: str | None, why: str) -> int:
    """Drain the run in RUN_DIR (default: the newest of runs/), or the one whose scheduler is at --connect.

    No new groups are leased; groups in flight finish, full batches are trained, the trainer saves a checkpoint, and
    every worker exits with 0. The command returns as soon as the scheduler has stored the request. To continue a
    drained run, use --resume.

    \b
    Examples:
      staleflow drain runs/mine
      staleflow drain --connect tcp://10.0.0.7:5551 --why "maintenance"
    """
    from staleflow.clients.admin import Admin
    from staleflow.monitor.sources import phase_of
    from staleflow.net.permissions import Role
    from staleflow.net.security import client_sockets
    from staleflow.supervisor.joining import check_not_ended

    folder, config, address = options.scheduler_of(run_dir, connect)
    if folder is not None:
        options.read_within(folder, lambda: check_not_ended(folder, address))
    sockets = client_sockets(config.security if config else None, Role.ADMIN)
    with Admin(address, "drain", transport=sockets) as admin:
        admin.drain(why)
        phase = phase_of(admin.status())
    draining = phase == "draining"
    outcome = "draining; staleflow status --why shows what is left" if draining else f"nothing to drain: {phase}"
    click.echo(f"the run at {address}: {outcome}")
    return 0
