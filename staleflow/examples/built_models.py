"""Keep the models that the examples build, so that a second run starts without the warm-up.

A built model depends on the builder's source, its arguments and the versions of torch and transformers. The digest of
these names a folder under ``$XDG_CACHE_HOME/staleflow/models`` (``~/.cache`` by default). It is always safe to delete.
"""

import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast

Build = TypeVar("Build", bound=Callable[..., None])

MAX_MODELS = 8
"""Models that are kept; the one that was used longest ago is deleted first."""

MAX_BYTES = 2 * 10**9
"""Size of all of them. The newest is kept even if it is larger."""

log = logging.getLogger(__name__)


def kept(build: Build) -> Build:
    """Decorate ``build(directory, seed, **options)`` so that it copies an equal model that was built before."""

    @functools.wraps(build)
    def build_or_copy(directory: Path, seed: int, **options: Any) -> None:
        entry = folder() / _digest(build, seed, options)
        if (entry / "config.json").is_file():
            try:
                os.utime(entry)  # before the copy: the model used longest ago is deleted first
                shutil.copytree(entry, directory)
            except OSError:  # another process deletes it at this moment
                shutil.rmtree(directory, ignore_errors=True)
            else:
                log.info("copied the model that an earlier run built: %s", entry)
                return
        build(directory, seed, **options)
        try:
            _keep(directory, entry)
        except OSError as error:  # a cache that cannot be written costs the next run its warm-up, nothing else
            log.warning("the built model is not kept: %s", error)

    return cast(Build, build_or_copy)


def folder() -> Path:
    """Where built models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "staleflow" / "models"


def _digest(build: Callable[..., None], seed: int, options: dict[str, Any]) -> str:
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    made_of = {
        "build": f"{build.__module__}:{build.__qualname__}",
        "seed": seed,
        "options": options,
        "source": hashlib.sha256(b"\0".join(sources)).hexdigest(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]


def _keep(directory: Path, entry: Path) -> None:
    """Copy beside ``entry`` and rename, so that no reader sees half a model. The first of two writers wins."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=entry.parent))
    try:
        shutil.copytree(directory, partial, dirs_exist_ok=True)
        if not entry.exists():
            partial.rename(entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    models = [path for path in entry.parent.iterdir() if path.name[0] != "."]
    total = 0
    for number, model in enumerate(sorted(models, key=lambda path: path.stat().st_mtime, reverse=True)):
        total += sum(path.stat().st_size for path in model.rglob("*"))
        if number and (number >= MAX_MODELS or total > MAX_BYTES):
            _delete(model)


def _delete(entry: Path) -> None:
    """Rename, then delete, so that no reader copies what is left of a model."""
    with suppress(OSError), tempfile.TemporaryDirectory(prefix=".deleted-", dir=entry.parent) as grave:
        entry.rename(Path(grave) / entry.name)
