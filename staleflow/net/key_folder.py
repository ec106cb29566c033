"""The folder of a run's keys: one file a role, and the allow-list. Existing files are never overwritten."""

from pathlib import Path

from staleflow.configs.durable_files import sync_path
from staleflow.configs.errors import ConfigError
from staleflow.net.allow_list import Holder, write_allowed
from staleflow.net.keys import ALLOWED, new_pair, write_key
from staleflow.net.permissions import Role

HANDED_OUT = (Role.ROLLOUT, Role.STAGE, Role.TRAINER, Role.PROMPTS, Role.MONITOR, Role.ADMIN)
"""Roles of workers and people. The servers' own key is the first one of a folder."""


def make_keys(folder: Path) -> list[Path]:
    """Create the folder (mode 0700) with one key a role and the allow-list; return the files. Raise ``ConfigError`` if
    the folder exists and is not empty."""
    try:
        folder.mkdir(mode=0o700, parents=True)
        sync_path(folder.parent)
    except FileExistsError:
        if not folder.is_dir() or any(folder.iterdir()):
            allowed = "the folder exists and is not empty; choose a new folder, or --add a key to it"
            raise ConfigError("DIR", str(folder), allowed) from None
        folder.chmod(0o700)
    server, secret = new_pair()
    holders = {server: Holder(Role.SERVER, Role.SERVER.value)}
    files = [folder / f"{Role.SERVER}.key"]
    write_key(files[0], Role.SERVER, server, secret, server)
    for role in HANDED_OUT:
        public, secret = new_pair()
        holders[public] = Holder(role, role.value)
        files.append(folder / f"{role}.key")
        write_key(files[-1], role, public, secret, server)
    write_allowed(folder / ALLOWED, holders)
    return [*files, folder / ALLOWED]
