"""Loading of a frozen ``Config`` from a TOML file and overrides, and its storage in a run directory.

A relative path in a file is relative to the file's directory, one in an override to the working directory. A loaded
configuration has only absolute paths, and hub ids of models. Every error is a ``ConfigError``.
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

from staleflow.configs import own_settings, presets, resumable
from staleflow.configs.durable_files import make_folder, sync_path, write_durably
from staleflow.configs.errors import MISSING, ConfigError, shown
from staleflow.configs.imports import is_file
from staleflow.configs.loading import overrides as dotted
from staleflow.configs.loading.explain import decode
from staleflow.configs.loading.hub import is_hub_id
from staleflow.configs.loading.hub_files import is_hub
from staleflow.configs.loading.toml import dumps
from staleflow.configs.own_settings import is_own, without_own
from staleflow.configs.rules.checks import check_engine, consistent, has_tokenizer
from staleflow.configs.schema import Config

RESOLVED = "config.json"
_PATHS = (
    *(("model", "path"), ("prompts", "path"), ("prompts", "eval_path"), ("reference", "path"), ("critic", "path")),
    *(("rollout.simulated", "trace"), ("security", "keys"), ("metrics", "token"), ("model.lora", "path")),
    ("simulation", "costs"),
)
_MODELS = (("model", "path"), ("reference", "path"), ("critic", "path"))
_SPECS = (
    *(("model", "build"), ("prompts", "source"), ("prompts", "eval_source"), ("environment", "run"), ("reward", "run")),
    *(("trainer.algorithm", "advantage"), ("trainer.algorithm", "loss"), ("rollout", "engine")),
)
_LISTS = (("stage",), ("eval",), ("reward", "functions"), ("prompts", "sources"))
"""Lists of tables with import paths."""
_LONGEST_SOCKET = 100
"""Maximum bytes of a Unix socket's path; the kernel's limit is 107."""


def load(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a file with ``key=value`` overrides, after checking that its keys agree.

    The keys of a preset are below those of the file that names it. A preset named by an override is itself an override,
    applied in its turn, and replaces the file's preset. Checks that depend on this machine (files, imports) are in
    ``presence.present``.
    """
    path = Path(path)
    table = _absolute(_read(path), path.resolve().parent)
    chosen = [dotted.parse(override) for override in overrides]
    if table.get("preset", "") != "" and all(key != ("preset",) for key, _ in chosen):
        table = presets.merge(presets.read(table["preset"]), table)
    for key, value in chosen:
        if key == ("preset",) and value != "":
            table = presets.merge(table, presets.read(value))
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
        raise ConfigError("configuration file", str(path), "no such file or run directory") from None
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
        if (section, key) in _MODELS and is_hub_id(text) and not (base / text).exists():
            continue  # each machine looks it up in its own cache
        text = str(_under(base, text, what)) if (section, key) in _PATHS else _spec_under(base, text, what)
        table = dotted.apply(table, [((*above, key), text)])
    for list_key in _LISTS:
        table = _absolute_entries(table, list_key, base)
    return _absolute_pools(table, base)


def _absolute_pools(table: dict[str, Any], base: Path) -> dict[str, Any]:
    """Return ``table`` with absolute paths in the entries of ``rollout.pool``, which have keys of ``rollout``."""
    rollout: Any = table.get("rollout")
    given: Any = cast(dict[str, Any], rollout).get("pool") if isinstance(rollout, dict) else None
    if not isinstance(given, list):
        return table
    entries = [
        _absolute({"rollout": one}, base)["rollout"] if isinstance(one, dict) else one
        for one in cast(Iterable[Any], given)
    ]
    return dotted.apply(table, [(("rollout", "pool"), entries)])


def _absolute_entries(table: dict[str, Any], list_key: tuple[str, ...], base: Path) -> dict[str, Any]:
    """Return ``table`` with absolute paths and import paths in each entry of a list of tables, like ``[[stage]]``."""
    given: Any = table
    for part in list_key:
        given = cast(dict[str, Any], given).get(part) if isinstance(given, dict) else None
    if not isinstance(given, list):
        return table
    entries = list[Any]()
    for place, one in enumerate(cast(Iterable[Any], given)):
        for name, absolute in (("run", _spec_under), ("source", _spec_under), ("path", _under)):
            if isinstance(one, dict) and isinstance(text := cast(dict[str, Any], one).get(name), str) and text:
                key = f"{'.'.join(list_key)}[{place}].{name}"
                one = {**cast(dict[str, Any], one), name: str(absolute(base, text, key))}
        entries.append(one)
    return dotted.apply(table, [(list_key, entries)])


def _spec_under(base: Path, spec: str, key: str) -> str:
    """Return an import path; if it names a file, with the absolute path of the file."""
    place, _, attribute = spec.rpartition(":")
    return f"{_under(base, place, key)}:{attribute}" if is_file(place) else spec


def _under(base: Path, text: str, key: str) -> Path | str:
    if is_hub(text):
        return text
    try:
        return Path(os.path.normpath(base / Path(text).expanduser()))
    except RuntimeError as error:
        raise ConfigError(key, text, "no user of that name has a home directory here") from error


def resumed(config: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration of a resumed run with ``overrides``, which may change the keys of ``resumable``."""
    table: dict[str, Any] = msgspec.to_builtins(config)
    for override in overrides:
        key, value = dotted.parse(override)
        if ".".join(key) not in resumable.KEYS:
            allowed = f"a run keeps its configuration: --resume may change {', '.join(resumable.KEYS)}"
            raise ConfigError(".".join(key), value, allowed)
        table = dotted.apply(table, [(key, value)])
    changed = decode(table)
    consistent(changed)
    resumable.check(changed, config)
    return changed


def worker_config(run: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration of a rollout worker of ``run``. Overrides may set only keys that workers do not share.

    Raises ``ConfigError``.
    """
    table: dict[str, Any] = msgspec.to_builtins(run)
    table["rollout"] |= {"pool": [], "workers": 1, "gpus": []}
    chosen = [dotted.parse(override) for override in overrides]
    if any(key == ("rollout", "engine") for key, _ in chosen):
        table["rollout"]["engine_options"] = {}  # options belong to their engine
    for key, value in chosen:
        if not is_own(key):
            allowed = f"all processes of a run share it; a rollout worker may set {own_settings.NAMES}"
            raise ConfigError(".".join(key), value, allowed)
        table = _merged(table, _absolute(dotted.apply({}, [(key, value)]), Path.cwd()), key)
    config = decode(table)
    check_engine(config)
    check_shared(config, run)
    return config


def shared(config: Config) -> Config:
    """Return the settings that all processes of a run share, with fixed values in place of the others."""
    return without_own(config, engine="transformers" if has_tokenizer(config) else "simulated")


def check_shared(config: Config, run: Config, name: str = "the run") -> None:
    """Raise ``ConfigError`` if a process with ``config`` cannot be part of ``run``, which messages call ``name``."""
    changed = list(differences(shared(config), shared(run)))
    if not changed:
        return
    key, ours, theirs = changed[0]
    if key == "rollout.engine":
        ours, theirs = config.rollout.engine, run.rollout.engine
    more = f" (other differences: {', '.join(key for key, *_ in changed[1:])})" if changed[1:] else ""
    raise ConfigError(key, ours, f"{name} has {shown(theirs)}, and all its processes share this key{more}")


def config_sha(config: Config) -> str:
    """Return the hex sha256 of the settings that all processes of a run share, as canonical JSON."""
    return hashlib.sha256(to_json(shared(config))).hexdigest()


def to_json(config: Config) -> bytes:
    """Return canonical JSON with sorted keys; ``from_json`` reads it back."""
    return msgspec.json.encode(config, order="deterministic")


def from_json(data: bytes) -> Config:
    """Return the configuration encoded by ``to_json``. Raises ``ConfigError``."""
    try:
        table = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError("configuration", data[:60].decode("utf-8", "replace"), f"it is not JSON: {error}") from error
    config = decode(table)
    consistent(config)
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Bind addresses of the servers of a run."""

    scheduler: str
    trajectories: tuple[str, ...]
    """Addresses in order of shard."""
    parameters: str

    @property
    def all(self) -> tuple[str, ...]:
        """All addresses, the scheduler's first."""
        return (self.scheduler, *self.trajectories, self.parameters)


def addresses(config: Config, run_dir: Path) -> Addresses:
    """Return the configured addresses; sockets in the run directory, whose folder is created, for empty ones."""
    result = planned(config, run_dir)
    for address in result.all:
        folder = Path(address.removeprefix("ipc://")).parent
        if folder == socket_folder(run_dir, config):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = folder.lstat()
            if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode):
                allowed = "it belongs to another user; choose a shorter run directory"
                raise ConfigError("socket folder", str(folder), allowed)
            if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                folder.chmod(0o700)
    return result


def planned(config: Config, run_dir: Path) -> Addresses:
    """Return the same as ``addresses`` without creating anything."""
    shards = [f"trajectories-{shard}" for shard in range(config.trajectories.shards)]
    given = [config.scheduler.bind, *(config.trajectories.bind or [""] * len(shards)), config.parameters.bind]
    folder = socket_folder(run_dir, config)
    names = ["scheduler", *shards, "parameters"]
    bound = [bind or f"ipc://{folder / name}" for bind, name in zip(given, names, strict=True)]
    return Addresses(scheduler=bound[0], trajectories=tuple(bound[1:-1]), parameters=bound[-1])


def socket_folder(run_dir: Path, config: Config) -> Path:
    """Return ``run_dir/sock``, or a short folder of this user if a socket's path there would be too long."""
    folder = run_dir.resolve() / "sock"
    longest = f"trajectories-{config.trajectories.shards}"
    if len(os.fsencode(folder / longest)) <= _LONGEST_SOCKET:
        return folder
    digest = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"staleflow-{os.getuid()}-{digest}"


def write_resolved(config: Config, run_dir: Path) -> None:
    """Write ``config.json`` and ``config.toml`` to the run directory, which is created if necessary."""
    make_folder(run_dir, 0o700)
    sync_path(run_dir.parent)
    write_durably(run_dir / "config.toml", dumps(msgspec.to_builtins(config)).encode())
    write_durably(run_dir / RESOLVED, msgspec.json.format(to_json(config), indent=2) + b"\n")


def read_run(run_dir: Path) -> Config:
    """Return the configuration with which a run directory was created."""
    try:
        return from_json((run_dir / RESOLVED).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError("run directory", str(run_dir), f"it has no {RESOLVED}, so no run was started there") from None
    except ConfigError as error:
        allowed = f"this version of staleflow cannot read its {RESOLVED}: {error}"
        raise ConfigError("run directory", str(run_dir), allowed) from error


def model_dir(config: Config, run_dir: Path) -> Path:
    """Return the model directory that every process of the run loads.

    For a hub id it is the link in the run directory, so that a resumed run keeps the revision of its first start.
    """
    path = config.model.path
    return Path(path) if path and not is_hub_id(path) else run_dir / "model"


def difference(left: Config, right: Config) -> tuple[str, object, object] | None:
    """Return the first key in which two configurations differ, with both values; None if they are equal."""
    return next(differences(left, right), None)


def differences(left: Config, right: Config) -> Iterator[tuple[str, object, object]]:
    """Yield each key in which two configurations differ, with both values."""
    ours, theirs = (dict(_leaves(msgspec.to_builtins(config), ())) for config in (left, right))
    for key in dict.fromkeys((*ours, *theirs)):
        if ours.get(key, MISSING) != theirs.get(key, MISSING):
            yield key, ours.get(key, MISSING), theirs.get(key, MISSING)


def _leaves(table: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(cast(dict[str, Any], value), (*path, key))
        else:
            yield ".".join((*path, key)), value
