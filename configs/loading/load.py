"""From a TOML file and overrides to one frozen ``Config``, and from there to a run directory and back.

A relative path in a file belongs to the file's directory, one in an override to the working directory; a loaded
configuration has absolute paths only. Whatever is wrong is one ``ConfigError``.
"""

import hashlib
import os
import stat
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from staleflow.configs import presets
from staleflow.configs.durable_files import make_folder, sync_path, write_durably
from staleflow.configs.errors import MISSING, ConfigError
from staleflow.configs.loading import overrides as dotted
from staleflow.configs.loading.explain import decode
from staleflow.configs.loading.imports import is_file
from staleflow.configs.loading.toml import dumps
from staleflow.configs.rules.checks import consistent
from staleflow.configs.schema import Config

RESOLVED = "config.json"
_PATHS = (
    *(("model", "path"), ("prompts", "path"), ("prompts", "eval_path"), ("reference", "path"), ("critic", "path")),
    *(("rollout.simulated", "trace"), ("security", "keys"), ("metrics", "token")),
)
_SPECS = (
    *(("model", "build"), ("prompts", "source"), ("prompts", "eval_source"), ("environment", "run"), ("reward", "run")),
    *(("trainer.algorithm", "advantage"), ("trainer.algorithm", "loss")),
)
_LONGEST_SOCKET = 100
"""Bytes of a Unix socket's path; the kernel's limit is 107."""


def load(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a file with ``key=value`` overrides; its keys agree with each other.

    A preset lies below the file that names it; named by an override it is one, in its turn, and the file's is none.
    What only this machine can tell (files, imports) is checked by ``presence.present``.
    """
    path = Path(path)
    table = _absolute(_read(path), path.resolve().parent)
    chosen = [dotted.parse(override) for override in overrides]
    if table.get("preset", "") != "" and all(key != ("preset",) for key, _ in chosen):
        table = presets.beneath(presets.read(table["preset"]), table)
    for key, value in chosen:
        if key == ("preset",) and value != "":
            table = presets.beneath(table, presets.read(value))
        given = dotted.apply({}, [(key, value)])
        table = _merged(table, _absolute(given, Path.cwd()), key)
    config = decode(table)
    try:
        consistent(config)
    except ConfigError as error:
        raise presets.named(error, config.preset) from None
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("configuration file", str(path), "no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("configuration file", str(path), f"it must be TOML: {error}") from error
    except OSError as error:
        raise ConfigError("configuration file", str(path), f"it cannot be read: {error.strerror}") from error


def _merged(table: dict[str, Any], given: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    value: Any = given
    for part in path:
        value = value[part]
    return dotted.apply(table, [(path, value)])


def _absolute(table: dict[str, Any], base: Path) -> dict[str, Any]:
    for section, key in (*_PATHS, *_SPECS):
        above = section.split(".")
        inner: Any = table
        for part in above:
            inner = cast(dict[str, Any], inner).get(part) if isinstance(inner, dict) else None
        text = cast(dict[str, Any], inner).get(key) if isinstance(inner, dict) else None
        if not isinstance(text, str) or not text:
            continue
        what = ".".join((*above, key))
        text = str(_under(base, text, what)) if (section, key) in _PATHS else _spec_under(base, text, what)
        table = dotted.apply(table, [((*above, key), text)])
    return _absolute_stages(table, base)


def _absolute_stages(table: dict[str, Any], base: Path) -> dict[str, Any]:
    """The import path of each ``[[stage]]``."""
    given: Any = table.get("stage")
    if not isinstance(given, list):
        return table
    found = list[Any]()
    for place, one in enumerate(cast(Iterable[Any], given)):
        if isinstance(one, dict) and isinstance(run := cast(dict[str, Any], one).get("run"), str):
            one = {**cast(dict[str, Any], one), "run": _spec_under(base, run, f"stage[{place}].run")}
        found.append(one)
    return {**table, "stage": found}


def _spec_under(base: Path, spec: str, key: str) -> str:
    """An import path; where it names a file, from the file system's root."""
    place, _, attribute = spec.rpartition(":")
    return f"{_under(base, place, key)}:{attribute}" if is_file(place) else spec


def _under(base: Path, text: str, key: str) -> Path:
    try:
        return Path(os.path.normpath(base / Path(text).expanduser()))
    except RuntimeError as error:
        raise ConfigError(key, text, "nobody of that name has a home directory here") from error


def resumed(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration of a run that is resumed with ``overrides``, which may change ``trainer.steps`` alone."""
    table: dict[str, Any] = msgspec.to_builtins(config)
    for override in overrides:
        key, value = dotted.parse(override)
        if key != ("trainer", "steps"):
            raise ConfigError(".".join(key), value, "a run keeps its configuration: --resume may change trainer.steps")
        table = dotted.apply(table, [(key, value)])
    changed = decode(table)
    consistent(changed)
    return changed


def with_steps(config: Config, steps: int) -> Config:
    """The same configuration but for ``trainer.steps``, the one key that a resumed run may change."""
    return msgspec.structs.replace(config, trainer=msgspec.structs.replace(config.trainer, steps=steps))


def config_sha(config: Config) -> str:
    """Identity of a configuration: hex sha256 of its canonical JSON."""
    return hashlib.sha256(to_json(config)).hexdigest()


def to_json(config: Config) -> bytes:
    """Canonical JSON, keys in order; ``from_json`` reads it back."""
    return msgspec.json.encode(config, order="deterministic")


def from_json(data: bytes) -> Config:
    """A configuration from ``to_json``, or ``ConfigError``."""
    try:
        table = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError("configuration", data[:60].decode("utf-8", "replace"), f"it is not JSON: {error}") from error
    config = decode(table)
    consistent(config)
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where each server of a run is bound."""

    scheduler: str
    trajectories: tuple[str, ...]
    """In order of shard."""
    parameters: str

    @property
    def all(self) -> tuple[str, ...]:
        """The scheduler's first."""
        return (self.scheduler, *self.trajectories, self.parameters)


def addresses(config: Config, run_dir: Path) -> Addresses:
    """The configured addresses; for those left empty, sockets in the run directory, whose folder is made."""
    found = planned(config, run_dir)
    for address in found.all:
        folder = Path(address.removeprefix("ipc://")).parent
        if folder == socket_folder(run_dir, config):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = folder.lstat()
            if held.st_uid != os.getuid() or not stat.S_ISDIR(held.st_mode):
                allowed = "it belongs to another user; choose a shorter run directory"
                raise ConfigError("socket folder", str(folder), allowed)
            if held.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                folder.chmod(0o700)
    return found


def planned(config: Config, run_dir: Path) -> Addresses:
    """As ``addresses``, but nothing is made."""
    shards = [f"trajectories-{shard}" for shard in range(config.trajectories.shards)]
    given = [config.scheduler.bind, *(config.trajectories.bind or [""] * len(shards)), config.parameters.bind]
    folder = socket_folder(run_dir, config)
    names = ["scheduler", *shards, "parameters"]
    bound = [bind or f"ipc://{folder / name}" for bind, name in zip(given, names, strict=True)]
    return Addresses(scheduler=bound[0], trajectories=tuple(bound[1:-1]), parameters=bound[-1])


def socket_folder(run_dir: Path, config: Config) -> Path:
    """``run_dir/sock``, or a short folder of this user when a socket's path there would be too long."""
    folder = run_dir.resolve() / "sock"
    longest = f"trajectories-{config.trajectories.shards}"
    if len(os.fsencode(folder / longest)) <= _LONGEST_SOCKET:
        return folder
    digest = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"staleflow-{os.getuid()}-{digest}"


def write_resolved(config: Config, run_dir: Path) -> None:
    """Puts ``config.json`` and ``config.toml`` into the run directory, which is made if need be."""
    make_folder(run_dir, 0o700)
    sync_path(run_dir.parent)
    write_durably(run_dir / "config.toml", dumps(msgspec.to_builtins(config)).encode())
    write_durably(run_dir / RESOLVED, msgspec.json.format(to_json(config), indent=2) + b"\n")


def read_run(run_dir: Path) -> Config:
    """The configuration that a run directory was made with."""
    try:
        return from_json((run_dir / RESOLVED).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError("run directory", str(run_dir), f"it has no {RESOLVED}, so no run was started there") from None
    except ConfigError as error:
        told = f"this version of staleflow cannot read its {RESOLVED}: {error}"
        raise ConfigError("run directory", str(run_dir), told) from error


def model_dir(config: Config, run_dir: Path) -> Path:
    """The model directory that every process of the run loads."""
    return Path(config.model.path) if config.model.path else run_dir / "model"


def difference(left: Config, right: Config) -> tuple[str, object, object] | None:
    """The first key in which two configurations differ, with both values."""
    ours, theirs = (dict(_leaves(msgspec.to_builtins(config), ())) for config in (left, right))
    for key in dict.fromkeys((*ours, *theirs)):
        if ours.get(key, MISSING) != theirs.get(key, MISSING):
            return key, ours.get(key, MISSING), theirs.get(key, MISSING)
    return None


def _leaves(table: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(cast(dict[str, Any], value), (*path, key))
        else:
            yield ".".join((*path, key)), value
