"""A run as its scheduler knows it, for a process that was told nothing but the address."""

from collections.abc import Sequence
from pathlib import Path

from staleflow.clients.admin import Admin
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import RESOLVED, from_json, load, read_run, write_resolved
from staleflow.configs.schema import Config
from staleflow.net.errors import Refused, RunOver, Unavailable
from staleflow.net.permissions import Role
from staleflow.net.security import client_sockets
from staleflow.supervisor import rundir, summary
from staleflow.supervisor.addresses import may_answer

_KEYS = {"train": Role.TRAINER, "relay": Role.SERVER}
"""By word of the command line; the others are called as their keys are."""


def joined(
    address: str, word: str, file: Path | None = None, overrides: Sequence[str] = (), *, timeout_s: float = 10.0
) -> tuple[Config, Path]:
    """The run's configuration and its directory: the scheduler's where that is on this host (or on a disk of both),
    else ``runs/attached-RUN`` here.

    ``word``: rollout, stage, train or relay. ``ConfigError`` when ``file`` and ``overrides`` are of another run,
    ``RunOver`` when it has finished, ``Unavailable`` when nobody answers.
    """
    with _asking(address, word) as admin:
        try:
            attached = admin.run(timeout_s=timeout_s)
        except Refused as refused:
            if refused.is_over:
                raise RunOver from refused
            raise
    theirs = from_json(attached.config)
    if file is not None and load(file, overrides) != theirs:
        raise ConfigError("--config", str(file), f'run "{attached.run}" at {address} has another configuration')
    if file is None and overrides:
        raise ConfigError("override", overrides[0], f'run "{attached.run}" at {address} has its configuration already')
    folder = Path(attached.run_dir)
    if not ((folder / RESOLVED).is_file() and read_run(folder) == theirs):
        folder = Path("runs") / f"attached-{attached.run}"
        write_resolved(theirs, folder)
    return theirs, folder


def check_not_ended(run_dir: Path, address: str) -> None:
    """``ConfigError`` where the run of a directory has ended: it has a summary, and nothing of it listens any more."""
    if may_answer(address) or rundir.holder(run_dir) is not None or (found := summary.read(run_dir)) is None:
        return
    ended = f"it has ended: {found.outcome}, {found.steps:,} of {found.steps_wanted:,} steps"
    raise ConfigError("run", str(run_dir), ended + (f"; resume with: {found.resume}" if found.resume else ""))


def has_ended(address: str, word: str, *, timeout_s: float) -> bool:
    """Return whether a worker of the run that has left has nothing to come back to; also without an answer in time.

    A trainer comes back while the run drains: what is sealed is still trained."""
    try:
        with _asking(address, word) as admin:
            if word == "train":
                return bool(admin.status(timeout_s=timeout_s).get("finished"))
            return admin.run(timeout_s=timeout_s).ending
    except (Unavailable, Refused):
        return True


def _asking(address: str, word: str) -> Admin:
    return Admin(address, transport=client_sockets(None, _KEYS.get(word) or Role(word)))
