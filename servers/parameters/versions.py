"""Versions of the weights as files of one folder. Blocking; whoever owns a loop calls the slow ones from a thread.

- ``<lineage>-<version>.bin`` holds the bytes, ``<lineage>-<version>.json`` says what they are. The second is written
  last, in one rename: without it nothing of the version is visible.
- What a publisher writes goes into ``upload-<any>.part``, what is deleted is ``gone-<any>.part`` until its room is
  given back. Such files, and bytes without a manifest, are what a killed process left behind: they are removed at the
  start.
- Fresh pages cost several times what written ones do. So the file of a deleted version that nobody holds becomes
  ``spare.part``, and the next version is written over it. A reader holds the file for as long as it has it mapped.
- ``durability = "power"``: a version is on disk before it is visible.
"""

import logging
import os
import secrets
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from staleflow.configs.durable_files import make_folder, sync_path
from staleflow.configs.schema import Durability
from staleflow.process.host import file_system
from staleflow.protocols.consistency.ids import BatchId, Lineage, TrainerTerm, Version
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.manifest import Digest, check
from staleflow.protocols.wire.messages import Manifest
from staleflow.store.disk_errors import spared, state_of
from staleflow.store.shared_file import SCARCE, hold, take
from staleflow.trace import run_history

log = logging.getLogger(__name__)

READ_BYTES = 1 << 20
"""Read at once when a file is verified: no more than stays in a core's cache."""


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
    """Inode, size and time of the file when its bytes were last known to be right."""


@dataclass(slots=True, kw_only=True)
class Staged:
    """A version that is being written."""

    key: VersionKey
    path: Path
    recycled: bool
    """Its bytes were another version's."""


class CorruptVersion(Exception):
    """Bytes are not those that the manifest names."""


class NoRoom(Exception):
    """There is no room for a version."""


class Unwritable(NoRoom):
    """The disk takes no writes: it is read-only, or fails. To delete a version would not help."""


class Scarce(OSError):
    """This process, or the machine, has no descriptor or memory left to read or write a version with, at present."""


class Versions:
    """The folder; made if it is missing, cleaned if it is there."""

    def __init__(self, folder: Path, *, durability: Durability) -> None:
        self._folder = folder
        self._sync = durability == "power"
        self._spare = folder / "spare.part"
        self.stored: dict[VersionKey, Stored] = {}
        make_folder(folder)
        self.reached = run_history.read(folder)
        """The run and its newest registered version, as noted in the folder."""
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
                    _unlink(path)

    # Writing ---------------------------------------------------------------------------------------------------------

    def stage(self, key: VersionKey, nbytes: int) -> Staged:
        """A file of the right size to write the version into; its bytes are any. ``NoRoom`` when it does not fit;
        ``Scarce``."""
        path = self._folder / f"upload-{secrets.token_hex(8)}.part"
        try:
            with _room(str(key)):
                recycled = self._recycle(path, nbytes)
                if not recycled:
                    self._check_room(key, nbytes)
                with path.open("r+b" if recycled else "wb") as file:
                    file.truncate(nbytes)
                    if nbytes and not _has_room(file.fileno(), nbytes):
                        os.posix_fallocate(file.fileno(), 0, nbytes)
        except (NoRoom, Scarce):
            _unlink(path)
            raise
        return Staged(key=key, path=path, recycled=recycled)

    def _recycle(self, path: Path, nbytes: int) -> bool:
        """The spare file as this one, where it is about as large, and another thread does not take it first."""
        try:
            size = self._spare.stat().st_size
            if not size // 2 <= nbytes <= size:
                self.drop_spare()
                return False
            self._spare.chmod(0o644)
            self._spare.replace(path)
        except FileNotFoundError:
            return False
        return True

    def drop_spare(self) -> None:
        """Give the room of the spare file back."""
        _unlink(self._spare)

    def _check_room(self, key: VersionKey, nbytes: int) -> None:
        """``NoRoom`` before a file that cannot fit is begun: a file system may fill up on the way to finding out."""
        disk = os.statvfs(self._folder)
        if nbytes > (free := disk.f_bavail * disk.f_frsize):
            raise NoRoom(f"{key}: it has {nbytes} bytes, {free} are free")

    def write(self, staged: Staged, offset: int, data: Data) -> None:
        """Put some bytes of the version where they belong. ``NoRoom`` where the file system reserved none for them;
        ``Scarce``."""
        with _room(str(staged.key)):
            descriptor = os.open(staged.path, os.O_WRONLY)
            try:
                _write(descriptor, offset, data)
            finally:
                os.close(descriptor)

    def discard(self, staged: Staged) -> None:
        """Forget what was written. Nobody's next: the publisher may still be writing."""
        _unlink(staged.path)

    def keep(self, staged: Staged, about: About, *, in_place: bool = False) -> Stored:
        """Make a version visible in the folder. Its bytes are read once more unless ``in_place``.

        ``CorruptVersion`` if they are not what was announced: they are gone then. ``NoRoom``, ``Scarce``: try again.
        """
        try:
            if not in_place:
                _verify(staged.path, about.manifest)
        except CorruptVersion:
            self.discard(staged)
            raise
        path = self._folder / f"{about.lineage}-{about.version}.bin"
        described = path.with_suffix(".json.part")
        with _room(str(about.key)):
            described.write_bytes(msgspec.json.encode(about))
            if staged.recycled:
                _close_gaps(staged.path, about.manifest)
            if self._sync:
                sync_path(described)
                sync_path(staged.path)
            path.with_suffix(".json").unlink(missing_ok=True)
            staged.path.replace(path)
            path.chmod(0o444)
            described.replace(path.with_suffix(".json"))
            if self._sync:
                sync_path(self._folder)
        return Stored(about=about, path=path, verified=_identity(path))

    def reach(self, run: str, key: VersionKey | None = None) -> None:
        """Note that the folder is of ``run``, and that the scheduler has registered ``key``. A note that finds no room
        lags until the next one."""
        was = self.reached
        newest = max(VersionKey(was.lineage, was.version), key or VersionKey(Lineage(0), Version(-1)))
        self.reached = run_history.KnownState(run=run, lineage=newest.lineage, version=newest.version)
        if self.reached != was:
            try:
                run_history.write(self._folder, self.reached, sync=self._sync)
            except OSError as error:
                log.warning("the newest version is not noted in %s: %s", self._folder, error)

    # Reading ---------------------------------------------------------------------------------------------------------

    def verify(self, stored: Stored, *, doubted: bool = False) -> None:
        """``CorruptVersion`` unless the bytes are right, or ``Scarce``. Cheap, unless ``doubted``, while the file is
        untouched."""
        identity = _identity(stored.path)
        if doubted or stored.verified != identity:
            _verify(stored.path, stored.about.manifest)
            stored.verified = identity

    def read(self, stored: Stored, offset: int, nbytes: int) -> bytes:
        """Some bytes of a version; fewer at its end. ``FileNotFoundError`` when it is deleted; ``Scarce``."""
        with _scarce(stored.path.name):
            descriptor = hold(stored.path)
            try:
                return os.pread(descriptor, nbytes, offset)
            finally:
                os.close(descriptor)

    def put_aside(self, key: VersionKey, *, reuse: bool = False) -> Path:
        """Forget a version at once; who has it mapped keeps the bytes. Returns the file to ``remove``, whose name the
        version may have again meanwhile. ``reuse``: it may take the next version, and is no longer there then."""
        path, aside = self.stored.pop(key).path, self._folder / f"gone-{secrets.token_hex(8)}.part"
        _move(path.with_suffix(".json"), aside.with_suffix(".json"))  # to unlink it may wait for the disk
        if not (reuse and not self._spare.exists() and _took(path, self._spare)):
            _move(path, aside)
        return aside

    def remove(self, aside: Path) -> None:
        """Give the room of a version back that was put aside: slow, where it is large, or the disk is busy."""
        for path in (aside.with_suffix(".json"), aside):
            _unlink(path)

    def delete(self, key: VersionKey) -> None:
        """Forget a version, and give its room back."""
        self.remove(self.put_aside(key))


@contextmanager
def _room(what: str) -> Generator[None]:
    """``NoRoom`` when the disk is full, ``Unwritable``, and ``Scarce``."""
    try:
        with _scarce(what):
            yield
    except Scarce:
        raise
    except OSError as error:
        if (state := state_of(error)) is not None:
            raise (NoRoom if state == "disk" else Unwritable)(f"{what}: {error.strerror}") from error
        raise


@contextmanager
def _scarce(what: str) -> Generator[None]:
    """``Scarce``."""
    try:
        yield
    except OSError as error:
        if error.errno in SCARCE:
            raise Scarce(f"{what}: {error.strerror}") from error
        raise


def _read(path: Path) -> About | None:
    """What a manifest file says; None for one that ``keep`` cannot have written."""
    try:
        about = msgspec.json.decode(path.read_bytes(), type=About)
        check(about.manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, ProtocolError):
        return None
    return about if path.stem == f"{about.lineage}-{about.version}" else None


def _has_room(descriptor: int, nbytes: int) -> bool:
    """Whether a file has memory for all its bytes; False where the answer is quick anyway, or is one of now only."""
    status = os.fstat(descriptor)
    return status.st_blocks * 512 >= nbytes and file_system(status.st_dev) == "tmpfs"


def _move(path: Path, aside: Path) -> None:
    try:
        path.replace(aside)
    except FileNotFoundError:
        pass
    except OSError as error:  # a full disk may have no room for another name
        log.warning("%s is deleted at once: %s", path.name, error)
        _unlink(path)


def _unlink(path: Path) -> None:
    """Remove a file. One that a read-only disk keeps is removed, or found again, at the next start."""
    with spared(f"{path.name} is not removed"):
        path.unlink(missing_ok=True)


def _took(path: Path, spare: Path) -> bool:
    """As ``take``; False as well where it cannot be had."""
    try:
        return take(path, spare)
    except OSError:
        return False


def _identity(path: Path) -> tuple[int, int, int]:
    try:
        with _scarce(path.name):
            found = path.stat()
    except Scarce:
        raise
    except FileNotFoundError as error:
        raise CorruptVersion(f"{path.name} is gone") from error
    except OSError as error:
        raise CorruptVersion(f"{path.name} cannot be read: {error.strerror}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns


def _verify(path: Path, manifest: Manifest) -> None:
    if (size := _identity(path)[1]) != manifest.nbytes:
        raise CorruptVersion(f"{path.name} has {size} bytes; its manifest says {manifest.nbytes}")
    try:
        with _scarce(path.name):
            descriptor = hold(path)
            try:
                _compare(descriptor, path.name, manifest)
            finally:
                os.close(descriptor)
    except Scarce:
        raise
    except OSError as error:
        raise CorruptVersion(f"{path.name} cannot be read: {error.strerror or 'it is gone'}") from error


def _compare(descriptor: int, name: str, manifest: Manifest) -> None:
    buffer = memoryview(bytearray(READ_BYTES))
    for entry in manifest.tensors:
        found = Digest()
        for piece in _pieces(descriptor, entry.offset, entry.nbytes, buffer):
            found.update(piece)
        if found.hex() != entry.digest:
            raise CorruptVersion(f"tensor {entry.name} in {name} is not what its digest says")


def _pieces(descriptor: int, offset: int, nbytes: int, buffer: memoryview) -> Iterator[memoryview]:
    """Each lies in the same buffer."""
    end = offset + nbytes
    while offset < end and (count := os.preadv(descriptor, [buffer[: end - offset]], offset)):
        offset += count
        yield buffer[:count]


def _close_gaps(path: Path, manifest: Manifest) -> None:
    """Zeros between the tensors, where the last version may have had others."""
    descriptor, end = os.open(path, os.O_WRONLY), 0
    try:
        for entry in manifest.tensors:
            _write(descriptor, end, bytes(entry.offset - end))
            end = entry.offset + entry.nbytes
    finally:
        os.close(descriptor)


def _write(descriptor: int, offset: int, data: Data) -> None:
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
