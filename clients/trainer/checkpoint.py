"""Checkpoints as directories: complete or absent, checked when read, the oldest removed.

``checkpoints/<version>/`` holds the backend's files and ``checkpoint.json``: the trainer's scalars and the size and
sha256 of every file. It is written under a name that no reader looks at, synced, and renamed; a trainer killed at any
instant leaves its older checkpoints as they were.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from staleflow.protocols.consistency.ids import BatchId, Lineage, Version

log = logging.getLogger(__name__)

SCHEMA = 1
HEAD = "checkpoint.json"
_PART = ".part"
_CHUNK = 1 << 20


class TrainerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scalars of a trainer: where it is, and what it counted."""

    lineage: Lineage = Lineage(0)
    version: Version = Version(0)
    last_batch: BatchId = BatchId(0)
    """The batch that made ``version``; 0 for none."""
    last_digest: str = ""
    tokens_trained: int = 0
    bad_steps: int = 0
    """Steps whose loss or gradient was not finite."""
    bad_in_a_row: int = 0
    evaluated: int = -1
    """Version of the last evaluation; -1 for none."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nbytes: int
    sha: str


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``checkpoint.json`` says."""

    schema: int
    run: str
    state: TrainerState
    files: dict[str, StoredFile]


class DamagedCheckpoint(Exception):
    """A directory that is no complete checkpoint; the text says what is wrong with it."""


class Checkpoints:
    """The checkpoints of one run, in ``folder``. One writer."""

    def __init__(self, folder: Path, *, run: str, keep: int) -> None:
        self.folder = folder
        self._run = run
        self._keep = keep

    def save(self, state: TrainerState, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint with the files that ``write`` puts into the directory it is given; it is durable then."""
        final = self.folder / str(state.version)
        part = self.folder / f"{state.version}{_PART}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        files = {name: _stored(part / name) for name in _names(part)}
        head = Head(schema=SCHEMA, run=self._run, state=state, files=files)
        (part / HEAD).write_bytes(msgspec.json.format(msgspec.json.encode(head), indent=2) + b"\n")
        _sync_tree(part)
        self._replace(part, final)
        self._forget_old()
        return final

    def newest(self) -> Iterator[tuple[Path, TrainerState]]:
        """Complete checkpoints of this run, the newest first; a damaged one is named in the log and left out."""
        for path in self._paths():
            try:
                yield path, self.read(path)
            except DamagedCheckpoint as damage:
                log.error("checkpoint %s is not used: %s", path, damage)

    def read(self, path: Path) -> TrainerState:
        """The scalars of a checkpoint, after every file of it was checked. ``DamagedCheckpoint`` says what is wrong."""
        try:
            head = msgspec.json.decode((path / HEAD).read_bytes(), type=Head)
        except (OSError, msgspec.DecodeError) as error:
            raise DamagedCheckpoint(f"{HEAD}: {error}") from error
        if head.schema != SCHEMA:
            raise DamagedCheckpoint(f"schema is {head.schema}; it must be {SCHEMA}")
        if head.run != self._run:
            raise DamagedCheckpoint(f"it belongs to run {head.run}, not to {self._run}")
        for name, stored in head.files.items():
            if not (path / name).is_file():
                raise DamagedCheckpoint(f"{name} is missing")
            if _stored(path / name) != stored:
                raise DamagedCheckpoint(f"{name} is not what was written")
        return head.state

    def drop_after(self, version: Version) -> None:
        """Remove the checkpoints of later versions: after a rollback they belong to a history that is gone."""
        for path in self._paths():
            if int(path.name) > version:
                log.warning("checkpoint %s belongs to a history that is gone: removed", path)
                shutil.rmtree(path, ignore_errors=True)

    def _paths(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if path.name.isdecimal() and path.is_dir()]
        return sorted(found, key=lambda path: -int(path.name))

    def _replace(self, part: Path, final: Path) -> None:
        """A directory cannot be renamed over another one: the older one steps aside first."""
        aside = final.with_name(f"{final.name}.old{_PART}")
        shutil.rmtree(aside, ignore_errors=True)
        if final.exists():
            final.rename(aside)
        part.rename(final)
        _sync(self.folder)
        shutil.rmtree(aside, ignore_errors=True)

    def _forget_old(self) -> None:
        for path in self._paths()[self._keep :]:
            shutil.rmtree(path, ignore_errors=True)


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _stored(path: Path) -> StoredFile:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return StoredFile(nbytes=path.stat().st_size, sha=digest.hexdigest())


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
