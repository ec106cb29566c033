"""The folder of a run's keys: one file a role, and the list of those that are allowed. Nothing is ever overwritten."""

from pathlib import Path

from staleflow.configs.durable_files import sync_path
from staleflow.configs.errors import ConfigError
from staleflow.net.allow_list import Holder, write_allowed
from staleflow.net.keys import ALLOWED, new_pair, write_key
from staleflow.net.permissions import Role

HANDED_OUT = (Role.ROLLOUT, Role.STAGE, Role.TRAINER, Role.MONITOR, Role.ADMIN)
"""Roles of workers and of people; the servers' own is the first key of a folder."""


def make_keys(folder: Path) -> list[Path]:
    """Makes the folder, mode 0700, with a key of each role and the list; returns the files. ``ConfigError`` for a
    folder that is there already, unless it is empty."""
    try:
        folder.mkdir(mode=0o700, parents=True)
        sync_path(folder.parent)
    except FileExistsError:
        if not folder.is_dir() or any(folder.iterdir()):
            allowed = "it is there already and left alone: choose a new folder, or --add a key to it"
            raise ConfigError("DIR", str(folder), allowed) from None
        folder.chmod(0o700)
    server, secret = new_pair()
    holders = {server: Holder(Role.SERVER, Role.SERVER.value)}
    made = [folder / f"{Role.SERVER}.key"]
    write_key(made[0], Role.SERVER, server, secret, server)
    for role in HANDED_OUT:
        public, secret = new_pair()
        holders[public] = Holder(role, role.value)
        made.append(folder / f"{role}.key")
        write_key(made[-1], role, public, secret, server)
    write_allowed(folder / ALLOWED, holders)
    return [*made, folder / ALLOWED]
