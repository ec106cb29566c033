"""Versions of the weights as files of one folder. Blocking; whoever owns a loop calls the slow ones from a thread.

- ``<lineage>-<version>.bin`` holds the bytes, ``<lineage>-<version>.json`` says what they are. The second is written
  last, in one rename: without it nothing of the version is visible.
- What a publisher writes goes into ``upload-<number>.part``. Such files, and bytes without a manifest, are what a
  killed process left behind: they are removed at the start.
- ``durability = "power"``: a version is on disk before it is visible.
"""

import errno
import hashlib
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from staleflow.configs.schema import Durability
from staleflow.protocols.consistency.ids import BatchId, Lineage, TrainerTerm, Version
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.manifest import check
from staleflow.protocols.wire.messages import Manifest, TensorEntry

READ_BYTES = 4 << 20
"""Read at once when a file is verified."""


class VersionKey(NamedTuple):
    """What a version is called."""

    lineage: Lineage
    version: Version

    def __str__(self) -> str:
        return f"version {self.version} of lineage {self.lineage}"


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the manifest file says: enough to register the version once more."""

    lineage: Lineage
    version: Version
    trainer_term: TrainerTerm
    batch: BatchId | None
    manifest: Manifest

    @property
    def key(self) -> VersionKey:
        return VersionKey(self.lineage, self.version)


@dataclass(slots=True, kw_only=True)
class Stored:
    """A version that is visible in the folder."""

    about: About
    path: Path
    verified: tuple[int, int, int] | None = None
    """Inode, size and time of the file when its checksums were last found right."""


@dataclass(slots=True, kw_only=True)
class Staged:
    """A version that is being written."""

    about: About
    path: Path


class CorruptVersion(Exception):
    """Bytes are not those that the manifest names."""


class NoRoom(Exception):
    """The disk has no room for a version."""


class Versions:
    """The folder; made if it is missing, cleaned if it is there."""

    def __init__(self, folder: Path, *, durability: Durability) -> None:
        self._folder = folder
        self._sync = durability == "power"
        self.stored: dict[VersionKey, Stored] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._collect()

    def _collect(self) -> None:
        """Learn what is visible; remove what is not."""
        for path in sorted(self._folder.glob("*.json")):
            if (about := _read(path)) is not None and path.with_suffix(".bin").exists():
                self.stored[about.key] = Stored(about=about, path=path.with_suffix(".bin"))
        visible = {stored.path.stem for stored in self.stored.values()}
        for pattern in ("*.part", "*.bin", "*.json"):
            for path in self._folder.glob(pattern):
                if path.suffix == ".part" or path.stem not in visible:
                    path.unlink()

    def stage(self, about: About, number: int) -> Staged:
        """A file of the right size to write the version into. ``NoRoom`` when the disk cannot hold it."""
        path, nbytes = self._folder / f"upload-{number}.part", about.manifest.nbytes
        self._check_room(about.key, nbytes)
        try:
            with _room(str(about.key)), path.open("wb") as file:
                if nbytes:
                    os.posix_fallocate(file.fileno(), 0, nbytes)
        except NoRoom:
            path.unlink(missing_ok=True)
            raise
        return Staged(about=about, path=path)

    def _check_room(self, key: VersionKey, nbytes: int) -> None:
        """``NoRoom`` before a file that cannot fit is begun: a file system may fill up on the way to finding out."""
        disk = os.statvfs(self._folder)
        if nbytes > (free := disk.f_bavail * disk.f_frsize):
            raise NoRoom(f"{key}: it has {nbytes} bytes, {free} are free")

    def write(self, staged: Staged, offset: int, data: Data) -> None:
        """Put some bytes of the version where they belong. ``NoRoom`` where the file system reserved none for them."""
        descriptor = os.open(staged.path, os.O_WRONLY)
        try:
            view = memoryview(data)
            with _room(str(staged.about.key)):
                while view.nbytes:
                    written = os.pwrite(descriptor, view, offset)
                    view, offset = view[written:], offset + written
        finally:
            os.close(descriptor)

    def discard(self, staged: Staged) -> None:
        """Forget what was written."""
        staged.path.unlink(missing_ok=True)

    def keep(self, staged: Staged) -> Stored:
        """Make a version visible in the folder.

        ``CorruptVersion`` if its bytes are not what was announced: they are gone then. ``NoRoom``: try again.
        """
        try:
            _verify(staged.path, staged.about.manifest)
        except CorruptVersion:
            self.discard(staged)
            raise
        path = self._folder / f"{staged.about.lineage}-{staged.about.version}.bin"
        described = path.with_suffix(".json.part")
        with _room(str(staged.about.key)):
            described.write_bytes(msgspec.json.encode(staged.about))
            self._flush(described)
            self._flush(staged.path)
            path.with_suffix(".json").unlink(missing_ok=True)
            staged.path.replace(path)
            path.chmod(0o444)
            described.replace(path.with_suffix(".json"))
            self._flush(self._folder)
        return Stored(about=staged.about, path=path, verified=_identity(path))

    def verify(self, stored: Stored) -> None:
        """``CorruptVersion`` unless the bytes are right. Cheap while the file is untouched since the last time."""
        identity = _identity(stored.path)
        if stored.verified != identity:
            _verify(stored.path, stored.about.manifest)
            stored.verified = identity

    def read(self, stored: Stored, offset: int, nbytes: int) -> bytes:
        """Some bytes of a version; fewer at its end."""
        descriptor = os.open(stored.path, os.O_RDONLY)
        try:
            return os.pread(descriptor, nbytes, offset)
        finally:
            os.close(descriptor)

    def delete(self, key: VersionKey) -> None:
        """Forget a version; who has it mapped keeps the bytes."""
        path = self.stored.pop(key).path
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def _flush(self, path: Path) -> None:
        if not self._sync:
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _room(what: str) -> Generator[None]:
    """``NoRoom`` when the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoRoom(f"{what}: {error.strerror}") from error
        raise


def _read(path: Path) -> About | None:
    """What a manifest file says; None for one that ``keep`` cannot have written."""
    try:
        about = msgspec.json.decode(path.read_bytes(), type=About)
        check(about.manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, ProtocolError):
        return None
    return about if path.stem == f"{about.lineage}-{about.version}" else None


def _identity(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise CorruptVersion(f"{path.name} is gone") from error
    return found.st_ino, found.st_size, found.st_mtime_ns


def _verify(path: Path, manifest: Manifest) -> None:
    if (size := _identity(path)[1]) != manifest.nbytes:
        raise CorruptVersion(f"{path.name} has {size} bytes; its manifest says {manifest.nbytes}")
    with path.open("rb") as file:
        for entry in manifest.tensors:
            if _sha(file.fileno(), entry) != entry.sha:
                raise CorruptVersion(f"tensor {entry.name} in {path.name} is not what its sha256 says")


def _sha(descriptor: int, entry: TensorEntry) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(descriptor, entry):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(descriptor: int, entry: TensorEntry) -> Iterator[bytes]:
    offset, end = entry.offset, entry.offset + entry.nbytes
    while offset < end and (piece := os.pread(descriptor, min(READ_BYTES, end - offset), offset)):
        offset += len(piece)
        yield piece
