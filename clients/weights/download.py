"""A version for a reader outside the run, such as an evaluation or a serving pool: from the mirror alone.

Consumes the index of the mirror. Waits for the version that the caller requests, at most ``timeout_s``.
"""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from staleflow.clients.background import LoopThread
from staleflow.clients.weights.mirror import fetch
from staleflow.clients.weights.pull import PulledVersion
from staleflow.clients.weights.remote import room
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.presence import TRAIN, check_package
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import GetManifest
from staleflow.store.mirror import Index, MirroredVersion, read_index, read_manifest
from staleflow.store.objects import NoObject, Objects, StoreError

T = TypeVar("T")

POLL_INTERVAL_S = 1.0
WEIGHTS = "model.safetensors"
ABOUT = "staleflow.json"


class NotMirrored(Exception):
    """The mirror does not have the requested version. ``str`` names the versions that it has."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``staleflow.json``: the version whose weights are beside it."""

    run: str
    lineage: int
    version: int
    sha: str


def fetch_weights(
    url: str, *, version: int | None = None, min_version: int = 0, timeout_s: float = 0.0
) -> PulledVersion:
    """Return verified weights from the mirror of a run, without a connection to the run.

    ``url``: ``parameters.mirror``, then ``/`` and the id of the run. ``version``: exactly this version.
    ``min_version``: otherwise, the newest version, which must be at least this one. ``timeout_s``: time to wait for a
    version that the mirror does not have yet; 0 does not wait.

    Raise ``NotMirrored`` if the mirror does not have the version, ``StoreError`` if it cannot be read,
    ``CorruptWeights`` if it is damaged, ``ConfigError`` for invalid arguments. Versions that a rollback abandoned are
    never returned once the index of the mirror shows the rollback, which takes a few seconds.
    """
    return _blocking(_fetched(url, version, min_version, timeout_s))[1]


def save_weights(
    url: str, folder: Path, *, version: int | None = None, min_version: int = 0, timeout_s: float = 0.0
) -> About:
    """Write the version that ``fetch_weights`` returns to ``model.safetensors`` in ``folder``, and its description to
    ``staleflow.json``. Each file is replaced atomically, the weights first.

    Raise the errors of ``fetch_weights``, ``NotMirrored`` also for a version whose weights the user moves
    (``external``), and ``OSError`` if the files cannot be written.
    """
    for package in ("torch", "safetensors"):
        check_package("--to", str(folder), package, TRAIN)
    index, pulled = _blocking(_fetched(url, version, min_version, timeout_s))
    if (elsewhere := pulled.external) is not None:
        raise NotMirrored(
            f"version {pulled.version} has no weights in the run, but the digest {elsewhere!r} in their place"
        )
    from staleflow.clients.weights.safetensors_file import write  # imports torch, which takes seconds

    about = About(run=index.run, lineage=pulled.lineage, version=pulled.version, sha=pulled.sha)
    folder.mkdir(parents=True, exist_ok=True)
    weights, described = folder / f"{WEIGHTS}.part", folder / f"{ABOUT}.part"
    try:
        described.write_bytes(msgspec.json.encode(about))
        write(pulled.tensors().values(), weights)
        weights.chmod(described.stat().st_mode)  # safetensors creates files for their owner only
        weights.replace(folder / WEIGHTS)
        described.replace(folder / ABOUT)
    finally:
        for unfinished in (weights, described):
            unfinished.unlink(missing_ok=True)
    return about


def _blocking(work: Coroutine[Any, Any, T]) -> T:
    """Return the result. The caller may itself run in an event loop, such as that of a notebook."""
    thread = LoopThread("weights")
    try:
        return thread.result(work)
    finally:
        thread.close(lambda: None)


async def _fetched(url: str, version: int | None, min_version: int, timeout_s: float) -> tuple[Index, PulledVersion]:
    if version is not None and min_version:
        raise ConfigError("min_version", min_version, "with version only one of the two")
    objects, deadline_s = Objects(url), time.monotonic() + timeout_s
    while True:
        index = None
        try:
            index = await read_index(objects)
            return index, await _read(objects, _chosen(objects, index, version, min_version))
        except _Gone:
            raise
        except (NotMirrored, NoObject) as error:
            deleted = isinstance(error, NoObject) and index is not None and await read_index(objects) != index
            if time.monotonic() >= deadline_s and not deleted:  # else the version was deleted while it was read
                raise
        await asyncio.sleep(min(POLL_INTERVAL_S, max(deadline_s - time.monotonic(), 0)))


class _Gone(NotMirrored):
    """The mirror has newer versions: the requested one will not come."""


def _chosen(objects: Objects, index: Index, version: int | None, min_version: int) -> MirroredVersion:
    existing = ", ".join(str(one.version) for one in index.versions) or "none"
    newest = index.versions[-1] if index.versions else None
    if version is None:
        if newest is None or newest.version < min_version:
            raise NotMirrored(f"{objects.url} has no version of at least {min_version} yet; it has {existing}")
        return newest
    if exact := [one for one in index.versions if one.version == version]:
        return exact[-1]
    if newest is not None and newest.version > version:
        raise _Gone(f"{objects.url} does not have version {version}, which was deleted or skipped; it has {existing}")
    raise NotMirrored(f"{objects.url} does not have version {version} yet; it has {existing}")


async def _read(objects: Objects, mirrored: MirroredVersion) -> PulledVersion:
    manifest = await read_manifest(objects, mirrored)
    try:
        buffer = room(mirrored.nbytes)
    except OSError as error:
        raise StoreError(f"no memory for the {mirrored.nbytes} bytes of {mirrored.folder}: {error.strerror}") from error
    await fetch(objects, mirrored, manifest, memoryview(buffer))
    asked = GetManifest(worker=WorkerId(""), lineage=mirrored.lineage, version=mirrored.version)
    data = memoryview(buffer).toreadonly()[: mirrored.nbytes]

    async def release() -> None:
        """Nothing is pinned."""

    return PulledVersion(asked, manifest, data, release, mirrored=True)
