"""Keys of a launched run: create missing ones, and select the files for each machine, which gets no others."""

import secrets
from pathlib import Path

import msgspec

from staleflow.configs.durable_files import make_folder, replace_durably
from staleflow.configs.schema import Config
from staleflow.launch.placement import Place, engines_on, has_relay, model_stages
from staleflow.net.key_folder import make_keys
from staleflow.net.keys import ALLOWED
from staleflow.net.permissions import Role

FOLDER = "keys"


def with_keys(config: Config, run_dir: Path) -> Config:
    """Return the configuration with ``security.keys``; the default is ``run_dir/keys`` unless the run is insecure."""
    if config.security.keys or config.security.insecure:
        return config
    return msgspec.structs.replace(
        config, security=msgspec.structs.replace(config.security, keys=str(run_dir / FOLDER))
    )


def ensure_keys(config: Config, run_dir: Path) -> None:
    """Create the default folder of ``with_keys`` if it does not exist."""
    folder = run_dir / FOLDER
    if config.security.keys == str(folder):
        make_folder(run_dir, 0o700)
        ensure_folder(folder)


def ensure_folder(folder: Path) -> None:
    """Create a folder of keys unless it exists.

    The folder is renamed into place when complete: a process that is killed half-way must not leave a folder that lacks
    a key, which the next start would take for complete.
    """
    if not folder.is_dir():
        partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        make_keys(partial)
        replace_durably(partial, folder)


def files_for(config: Config, place: Place) -> list[Path]:
    """Return the key files for a machine. A relay accepts connections like a server and needs the server's files."""
    if not config.security.keys:
        return []
    if place.part == "trainer":
        names = [key_file(Role.TRAINER)]
        names += [key_file(Role.STAGE)] if place.number == 0 and model_stages(config, place.gpus) else []
    else:
        names = [key_file(Role.ROLLOUT)]
        engines = len(engines_on(config, place.number, place.machines))
        names += [key_file(Role.SERVER), ALLOWED] if has_relay(place.relays, engines, place.machines) else []
    return [Path(config.security.keys) / name for name in names]


def key_file(role: Role) -> str:
    """Return the file name of a role's key."""
    return f"{role}.key"
