"""The keys of a launched run: made where it has none, and which of them a machine must have. No machine has more."""

import secrets
from pathlib import Path

import msgspec

from staleflow.configs.durable_files import make_folder, replace_durably
from staleflow.configs.launch import share
from staleflow.configs.schema import Config
from staleflow.launch.placement import Place, has_relay, model_stages
from staleflow.net.key_folder import make_keys
from staleflow.net.keys import ALLOWED
from staleflow.net.permissions import Role

FOLDER = "keys"


def with_keys(config: Config, run_dir: Path) -> Config:
    """The configuration with keys; ``run_dir/keys`` where it names none and does not ask to be insecure."""
    if config.security.keys or config.security.insecure:
        return config
    return msgspec.structs.replace(
        config, security=msgspec.structs.replace(config.security, keys=str(run_dir / FOLDER))
    )


def ensure_keys(config: Config, run_dir: Path) -> None:
    """Makes the folder of ``with_keys`` if it is not there yet."""
    folder = run_dir / FOLDER
    if config.security.keys == str(folder):
        make_folder(run_dir, 0o700)
        make_whole(folder)


def make_whole(folder: Path) -> None:
    """Makes a folder of keys unless it is there. Whoever is killed meanwhile leaves none, rather than one that lacks
    a key: the next one would take it for whole."""
    if not folder.is_dir():
        beside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        make_keys(beside)
        replace_durably(beside, folder)


def files_for(config: Config, place: Place) -> list[Path]:
    """What a machine's processes need. A relay listens as servers do, so it has their key and their list."""
    if not config.security.keys:
        return []
    if place.part == "trainer":
        names = [key_file(Role.TRAINER)]
        names += [key_file(Role.STAGE)] if place.number == 0 and model_stages(config, place.gpus) else []
    else:
        names = [key_file(Role.ROLLOUT)]
        engines = len(share(config.rollout.workers, place.number, place.machines))
        names += [key_file(Role.SERVER), ALLOWED] if has_relay(place.relays, engines, place.machines) else []
    return [Path(config.security.keys) / name for name in names]


def key_file(role: Role) -> str:
    """Name of a role's file in a folder of keys."""
    return f"{role}.key"
