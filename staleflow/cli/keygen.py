"""``staleflow keygen``: create the keys of a run that spans several machines."""

from pathlib import Path

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

ROLES = ("rollout", "stage", "trainer", "prompts", "monitor", "admin")
"""Roles of workers and operators; servers have the role ``server``."""


@click.command("keygen", short_help="Create the keys of a run that binds beyond this machine.")
@click.argument("folder", type=options.DIRECTORY, metavar="DIR")
@click.option("--add", type=click.Choice(ROLES), metavar="ROLE", help=f"Add one key of a role: {', '.join(ROLES)}.")
@click.option("--name", metavar="NAME", help="Name of the added key and its file. Default: generated.")
def command(folder: Path, add: str | None, name: str | None) -> int:
    """Create DIR with a key file for each role and the list of allowed keys. Set security.keys to DIR.

    For a worker on another machine, copy ROLE.key there and set STALEFLOW_KEY to the path of the copy. --add creates
    one more key in DIR, to distinguish workers or to replace a key. To revoke a key, remove its line from
    allowed.toml. Running servers apply changes at once. Existing files are never overwritten.

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
        raise ConfigError("--name", name, "another key has this name; choose a different one")
    public, secret = new_pair()
    write_key(folder / f"{name}.key", Role(role), public, secret, server)
    write_allowed(folder / ALLOWED, {**holders, public: Holder(Role(role), name)})
    return folder / f"{name}.key"
