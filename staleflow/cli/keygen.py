"""``staleflow keygen``: the keys of a run whose processes are on several machines."""

from pathlib import Path

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

ROLES = ("rollout", "stage", "trainer", "monitor", "admin")
"""Of workers and of people; the servers' own role is ``server``."""


@click.command("keygen", short_help="Make the keys of a run that binds beyond this machine.")
@click.argument("folder", type=options.DIRECTORY, metavar="DIR")
@click.option("--add", type=click.Choice(ROLES), metavar="ROLE", help=f"One more key, for one of {', '.join(ROLES)}.")
@click.option("--name", metavar="NAME", help="Of the added key and its file. Default: made up.")
def command(folder: Path, add: str | None, name: str | None) -> int:
    """Make DIR with a key file for each role and the list of allowed keys; security.keys then names it.

    A worker on another machine needs a copy of its role's file, and STALEFLOW_KEY that names it. With --add: one more
    key for DIR, to tell workers apart or to replace a key; a key is revoked by removing its line from allowed.toml.
    Running servers follow at once. Nothing is ever overwritten.

    \b
    Examples:
      staleflow keygen keys
      staleflow keygen keys --add rollout --name gpu-box-7
    """
    if add is not None:
        click.echo(_add(folder, add, name))
        return 0
    if name is not None:
        raise ConfigError("--name", name, "it needs --add")
    from staleflow.net.key_folder import make_keys

    for path in make_keys(folder):
        click.echo(path)
    return 0


def _add(folder: Path, role: str, name: str | None) -> Path:
    import os

    from staleflow.net.allow_list import Holder, read_allowed, write_allowed
    from staleflow.net.keys import ALLOWED, check_name, new_pair, read_key, write_key
    from staleflow.net.permissions import Role

    server = read_key(folder / f"{Role.SERVER}.key").public
    holders = read_allowed(folder / ALLOWED)
    name = check_name(name or f"{role}-{os.urandom(3).hex()}")
    if any(holder.name == name for holder in holders.values()):
        raise ConfigError("--name", name, "another key has it; choose another name")
    public, secret = new_pair()
    write_key(folder / f"{name}.key", Role(role), public, secret, server)
    write_allowed(folder / ALLOWED, {**holders, public: Holder(Role(role), name)})
    return folder / f"{name}.key"
