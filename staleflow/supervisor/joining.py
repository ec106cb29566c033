"""Join a run for which only the scheduler's address is known."""

import secrets
from collections.abc import Sequence
from pathlib import Path

from staleflow.clients.admin import Admin
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import (
    RESOLVED,
    check_shared,
    from_json,
    load,
    read_run,
    worker_config,
    write_resolved,
)
from staleflow.configs.schema import Config
from staleflow.net.errors import Refused, RunOver, Unavailable
from staleflow.net.permissions import Role
from staleflow.net.security import client_sockets
from staleflow.supervisor import rundir, summary
from staleflow.supervisor.addresses import may_answer

_KEY_ROLES = {"train": Role.TRAINER, "relay": Role.SERVER}
"""Key role of a worker role on the command line, where the two names differ."""
_NAME_BYTES = 8
"""Random bytes of a generated name, enough that two workers of a run never generate the same one."""


def generated_name(role: str, stage: str) -> str:
    """Return the name of a worker that was given none. ``role`` is rollout, stage, train or relay."""
    return "trainer" if role == "train" else f"{stage if role == 'stage' else role}-{secrets.token_hex(_NAME_BYTES)}"


def join_run(
    address: str, role: str, file: Path | None = None, overrides: Sequence[str] = (), *, timeout_s: float = 10.0
) -> tuple[Config, Path]:
    """Return the run's configuration and run directory.

    The directory is the scheduler's if this host can read it, else ``runs/attached-RUN``. ``role`` is rollout, stage,
    train or relay. The configuration is the run's, with the settings of its own that ``file`` and ``overrides`` give a
    rollout worker. Raise ``ConfigError`` if they describe another run, or if another user owns the scheduler's Unix
    socket or directory; ``RunOver`` if the run has finished; ``Unavailable`` if the scheduler does not answer.
    """
    with _admin(address, role) as admin:
        try:
            attached = admin.run(timeout_s=timeout_s)
        except Refused as refused:
            if refused.is_over:
                raise RunOver from refused
            raise
    if address.startswith("ipc://"):
        rundir.check_owner(Path(address.removeprefix("ipc://")), "socket")
    run = from_json(attached.config)
    config = settings_of(run, role, file, overrides, f'run "{attached.run}" at {address}')
    folder = Path(attached.run_dir)
    if (folder / RESOLVED).is_file() and read_run(folder) == run:
        rundir.check_owner(folder)
    else:
        folder = Path("runs") / f"attached-{attached.run}"
        write_resolved(run, folder)
    return config, folder


def settings_of(run: Config, role: str, file: Path | None, overrides: Sequence[str], name: str) -> Config:
    """Return the configuration of a process of ``run``, which messages call ``name``.

    It is the run's, except for a rollout worker: ``file``, or else ``overrides``, may give it settings of its own.
    """
    if file is not None:
        config = load(file, overrides)
        check_shared(config, run, name)
        return config if role == "rollout" else run
    if role == "rollout":
        return worker_config(run, overrides)
    if overrides:
        raise ConfigError("override", overrides[0], f"{name} has its configuration: leave it out")
    return run


def check_not_ended(run_dir: Path, address: str) -> None:
    """Raise ``ConfigError`` if the run has ended: a summary exists, and no server of the run listens."""
    if may_answer(address) or rundir.holder(run_dir) is not None or (result := summary.read(run_dir)) is None:
        return
    ended = f"the run has ended: {result.outcome}, {result.steps:,} of {result.steps_wanted:,} steps"
    raise ConfigError("run", str(run_dir), ended + (f"; resume with: {result.resume}" if result.resume else ""))


def has_ended(address: str, role: str, *, timeout_s: float) -> bool:
    """Return whether a worker that left the run need not rejoin; also True if the scheduler does not answer in time.

    A trainer must rejoin while the run drains, because sealed batches are still trained.
    """
    try:
        with _admin(address, role) as admin:
            if role == "train":
                return admin.status(timeout_s).finished
            return admin.run(timeout_s=timeout_s).ending
    except (Unavailable, Refused):
        return True


def _admin(address: str, role: str) -> Admin:
    return Admin(address, transport=client_sockets(None, _KEY_ROLES.get(role) or Role(role)))
