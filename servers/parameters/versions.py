"""Versions of the weights as files. Blocking: the owner of an event loop calls slow methods in a thread.

- ``<lineage>-<version>.bin`` has the bytes, ``<lineage>-<version>.json`` describes them. The latter is written last, in
  one rename: without it, nothing of the version is visible.
- A publisher writes into ``upload-<any>.part``. A deleted version is ``gone-<any>.part`` until its room is freed. Such
  files, and bytes without a manifest, are remains of a killed process and are removed at the start.
- Fresh pages cost several times as much as written ones. So the file of a deleted version that no reader has mapped
  becomes ``spare.part``, and the next version overwrites it. A reader locks the file for as long as it has it mapped.
- ``durability = "power"``: a version is on disk before it is visible.
- A version lies in the folder on disk, or in one in shared memory (``Memory``). The folder on disk has the note of the
  newest registered version in any case, because it survives a reboot.
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
from staleflow.process import memory_folder
from staleflow.process.host import file_system
from staleflow.process.main_memory import available
from staleflow.protocols.consistency.ids import BatchId, Lineage, TrainerTerm, Version
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.manifest import Digest, check
from staleflow.protocols.wire.messages import Manifest
from staleflow.servers.parameters.memory import Memory
from staleflow.store.disk_errors import Scarce, spared, state_of
from staleflow.store.shared_file import SCARCE, hold, take
from staleflow.trace import run_history

log = logging.getLogger(__name__)

SPARE = "spare.part"
READ_BYTES = 1 << 20
"""Bytes read at once by a verification: a block that stays in the cache of a core."""


class VersionKey(NamedTuple):
    """Identity of a version."""

    lineage: Lineage
    version: Version

    def __str__(self) -> str:
        return f"version {self.version} of lineage {self.lineage}"


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the manifest file: enough to register the version again."""

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
    """Version that is visible in the folder."""

    about: About
    path: Path
    verified: tuple[int, int, int] | None = None
    """Inode, size and modification time of the file when its bytes were last verified."""


@dataclass(slots=True, kw_only=True)
class Staged:
    """Version that is being written."""

    key: VersionKey
    path: Path
    recycled: bool
    """The file has the bytes of an older version."""


class CorruptVersion(Exception):
    """The bytes do not match the manifest."""


class NoRoom(Exception):
    """The disk has no room for a version."""


class Unwritable(NoRoom):
    """The disk is read-only or failing. Deleting a version would not help."""


class Versions:
    """Folder of versions. Created if it is missing, else cleaned of the remains of a killed process."""

    def __init__(self, folder: Path, *, durability: Durability, memory: Memory | None = None) -> None:
        """``memory``: folder in shared memory for the versions that it accepts."""
        self._folder = folder
        self._memory = memory
        self._folders = [folder] if memory is None else [folder, memory.folder]
        self._sync = durability == "power"
        self.stored: dict[VersionKey, Stored] = {}
        make_folder(folder)
        self._noted = {folder: run_history.read(folder) for folder in self._folders}
        self.reached = self._noted[folder]
        """Run and its newest registered version, as recorded in the folder on disk."""
        if memory is not None and _contradicts(self._noted[memory.folder], self.reached):
            log.warning("versions in %s deleted: they are not of this run directory", memory.folder)
            memory_folder.clear(memory.folder)
            self._noted[memory.folder] = run_history.KnownState()
        for folder in self._folders:
            self._collect(folder)

    def _collect(self, folder: Path) -> None:
        """Index the visible versions of a folder; remove all other files."""
        for path in sorted(folder.glob("*.json")):
            if (about := _read(path)) is not None and path.with_suffix(".bin").exists():
                self.stored[about.key] = Stored(about=about, path=path.with_suffix(".bin"))
        visible = {stored.path for stored in self.stored.values()}
        for pattern in ("*.part", "*.bin", "*.json"):
            for path in folder.glob(pattern):
                if path.suffix == ".part" or path.with_suffix(".bin") not in visible:
                    _unlink(path)

    # Writing ---------------------------------------------------------------------------------------------------------

    def stage(self, key: VersionKey, nbytes: int) -> Staged:
        """Create a file of the right size for a version; its content is arbitrary.

        Raise ``NoRoom`` if it does not fit, or ``Scarce``; ``ConfigError`` if it can never fit into memory and must.
        """
        if self._memory is not None and self._memory.accepts(nbytes):
            try:
                return self._stage(self._memory.folder, key, nbytes)
            except NoRoom as error:
                if self._memory.required:
                    raise
                self._memory.leave(str(error))
        return self._stage(self._folder, key, nbytes)

    def _stage(self, folder: Path, key: VersionKey, nbytes: int) -> Staged:
        path = folder / f"upload-{secrets.token_hex(8)}.part"
        try:
            with _room(str(key)):
                recycled = self._recycle(path, nbytes)
                if not recycled:
                    self._check_room(folder, key, nbytes)
                with path.open("r+b" if recycled else "wb") as file:
                    file.truncate(nbytes)
                    if nbytes and not _has_room(file.fileno(), nbytes):
                        os.posix_fallocate(file.fileno(), 0, nbytes)
        except (NoRoom, Scarce):
            _unlink(path)
            raise
        return Staged(key=key, path=path, recycled=recycled)

    def _recycle(self, path: Path, nbytes: int) -> bool:
        """Use the spare file if it has about the right size. Return False if not, or if another thread took it."""
        spare = path.with_name(SPARE)
        try:
            size = spare.stat().st_size
            if not size // 2 <= nbytes <= size:
                _unlink(spare)
                return False
            spare.chmod(0o644)
            spare.replace(path)
        except FileNotFoundError:
            return False
        return True

    def _check_room(self, folder: Path, key: VersionKey, nbytes: int) -> None:
        """Raise ``NoRoom`` before creating a file that cannot fit: allocating it could fill the file system first."""
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        if folder != self._folder:  # shared memory may be larger than the memory that is free
            free = min(free, available())
        if nbytes > free:
            raise NoRoom(f"{key} has {nbytes} bytes; {free} bytes are free")

    def write(self, staged: Staged, offset: int, data: Data) -> None:
        """Write some bytes of a version at ``offset``. Raise ``NoRoom`` if the file system has not reserved room, or
        ``Scarce``."""
        with _room(str(staged.key)):
            descriptor = os.open(staged.path, os.O_WRONLY)
            try:
                _write(descriptor, offset, data)
            finally:
                os.close(descriptor)

    def discard(self, staged: Staged) -> None:
        """Delete the file of an upload. It is not recycled: the publisher may still be writing into it."""
        _unlink(staged.path)

    def keep(self, staged: Staged, about: About, *, in_place: bool = False) -> Stored:
        """Make a version visible in the folder. Its bytes are verified first unless ``in_place``.

        Raise ``CorruptVersion`` if they do not match the manifest; the upload is deleted then. ``NoRoom`` and
        ``Scarce`` permit a retry.
        """
        try:
            if not in_place:
                _verify(staged.path, about.manifest)
        except CorruptVersion:
            self.discard(staged)
            raise
        path = staged.path.with_name(f"{about.lineage}-{about.version}.bin")
        described = path.with_suffix(".json.part")
        earlier = self.stored.get(about.key)
        # A damaged file of this version may lie in the other folder.
        moved = earlier.path if earlier is not None and earlier.path != path else None
        with _room(str(about.key)):
            described.write_bytes(msgspec.json.encode(about))
            if staged.recycled:
                _close_gaps(staged.path, about.manifest)
            if self._sync:
                sync_path(described)
                sync_path(staged.path)
            # Remove an old manifest before the bytes are replaced: a crash in between must not leave a manifest that
            # describes other bytes.
            if moved is not None:
                moved.with_suffix(".json").unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)
            staged.path.replace(path)
            path.chmod(0o444)
            described.replace(path.with_suffix(".json"))
            if self._sync:
                sync_path(path.parent)
            if moved is not None:
                _unlink(moved)
        return Stored(about=about, path=path, verified=_identity(path))

    def reach(self, run: str, key: VersionKey | None = None) -> None:
        """Record the run of the folder, and that the scheduler has registered ``key``. If the disk is full, the
        record lags until the next call."""
        was = self.reached
        newest = max(VersionKey(was.lineage, was.version), key or VersionKey(Lineage(0), Version(-1)))
        self.reached = run_history.KnownState(run=run, lineage=newest.lineage, version=newest.version)
        for folder in self._folders:  # the disk first: the record in memory must not be ahead of it
            if self._noted[folder] == self.reached:
                continue
            try:
                run_history.write(folder, self.reached, sync=self._sync)
            except OSError as error:
                log.warning("could not record the newest version in %s: %s", folder, error)
                return
            self._noted[folder] = self.reached

    # Reading ---------------------------------------------------------------------------------------------------------

    def verify(self, stored: Stored, *, doubted: bool = False) -> None:
        """Verify a version. Raise ``CorruptVersion`` if the bytes are wrong, or ``Scarce``.

        Cheap while the file is unmodified, unless the bytes are ``doubted``.
        """
        identity = _identity(stored.path)
        if doubted or stored.verified != identity:
            _verify(stored.path, stored.about.manifest)
            stored.verified = identity

    def read(self, stored: Stored, offset: int, nbytes: int) -> bytes:
        """Return some bytes of a version; fewer at its end. Raise ``FileNotFoundError`` if it was deleted, or
        ``Scarce``."""
        with _scarce(stored.path.name):
            descriptor = hold(stored.path)
            try:
                return os.pread(descriptor, nbytes, offset)
            finally:
                os.close(descriptor)

    def put_aside(self, key: VersionKey, *, reuse: bool = False) -> Path:
        """Make a version invisible and return its renamed file, to pass to ``remove``.

        Readers that have it mapped keep the bytes, and the version may be published again in the meantime. ``reuse``:
        keep the file as the spare for the next version if possible; the returned file does not exist then.
        """
        path = self.stored.pop(key).path
        aside, spare = path.with_name(f"gone-{secrets.token_hex(8)}.part"), path.with_name(SPARE)
        _move(path.with_suffix(".json"), aside.with_suffix(".json"))  # rename, because an unlink may wait for the disk
        if not (reuse and not spare.exists() and _take_spare(path, spare)):
            _move(path, aside)
        return aside

    def remove(self, aside: Path) -> None:
        """Delete the file of a version that was put aside. Slow if the file is large or the disk is busy."""
        for path in (aside.with_suffix(".json"), aside):
            _unlink(path)

    def delete(self, key: VersionKey) -> None:
        """Delete a version and its file."""
        self.remove(self.put_aside(key))


def _contradicts(noted: run_history.KnownState, disk: run_history.KnownState) -> bool:
    """Return True if a record in memory is not of the run directory that has the other record: the run directory was
    deleted or restored from a backup since."""
    return noted.run != disk.run or (noted.lineage, noted.version) > (disk.lineage, disk.version)


@contextmanager
def _room(what: str) -> Generator[None]:
    """Translate disk errors: ``NoRoom`` if the disk is full, ``Unwritable``, ``Scarce``."""
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
    """Translate a lack of descriptors or memory to ``Scarce``."""
    try:
        yield
    except OSError as error:
        if error.errno in SCARCE:
            raise Scarce(f"{what}: {error.strerror}") from error
        raise


def _read(path: Path) -> About | None:
    """Return the content of a manifest file; None if ``keep`` cannot have written it."""
    try:
        about = msgspec.json.decode(path.read_bytes(), type=About)
        check(about.manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, ProtocolError):
        return None
    return about if path.stem == f"{about.lineage}-{about.version}" else None


def _has_room(descriptor: int, nbytes: int) -> bool:
    """Return True if a tmpfs file has memory for all its bytes.

    False for other file systems, where reserving is fast, or where free blocks are no promise for later.
    """
    status = os.fstat(descriptor)
    return status.st_blocks * 512 >= nbytes and file_system(status.st_dev) == "tmpfs"


def _move(path: Path, aside: Path) -> None:
    try:
        path.replace(aside)
    except FileNotFoundError:
        pass
    except OSError as error:  # a full disk may have no room for the new name
        log.warning("%s deleted without being renamed: %s", path.name, error)
        _unlink(path)


def _unlink(path: Path) -> None:
    """Remove a file. If a read-only disk keeps it, the next start removes it or finds it again."""
    with spared(f"{path.name} could not be removed"):
        path.unlink(missing_ok=True)


def _take_spare(path: Path, spare: Path) -> bool:
    """Same as ``take``, but return False on errors, too."""
    try:
        return take(path, spare)
    except OSError:
        return False


def _identity(path: Path) -> tuple[int, int, int]:
    try:
        with _scarce(path.name):
            status = path.stat()
    except Scarce:
        raise
    except FileNotFoundError as error:
        raise CorruptVersion(f"{path.name} is gone") from error
    except OSError as error:
        raise CorruptVersion(f"{path.name} cannot be read: {error.strerror}") from error
    return status.st_ino, status.st_size, status.st_mtime_ns


def _verify(path: Path, manifest: Manifest) -> None:
    with reading(path, manifest.nbytes) as descriptor:
        _compare(descriptor, path.name, manifest)


@contextmanager
def reading(path: Path, nbytes: int) -> Generator[int]:
    """Yield a descriptor of a version's file, to read all of it.

    Raise ``CorruptVersion`` if it has not ``nbytes`` bytes or cannot be read, or ``Scarce``.
    """
    if (size := _identity(path)[1]) != nbytes:
        raise CorruptVersion(f"{path.name} has {size} bytes; its manifest requires {nbytes}")
    try:
        with _scarce(path.name):
            descriptor = hold(path)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
    except Scarce:
        raise
    except OSError as error:
        raise CorruptVersion(f"{path.name} cannot be read: {error.strerror or 'it is gone'}") from error


def _compare(descriptor: int, name: str, manifest: Manifest) -> None:
    buffer = memoryview(bytearray(READ_BYTES))
    for entry in manifest.tensors:
        digest = Digest()
        for piece in pieces(descriptor, entry.offset, entry.nbytes, buffer):
            digest.update(piece)
        if digest.hex() != entry.digest:
            raise CorruptVersion(f"tensor {entry.name} in {name} does not match its digest")


def pieces(descriptor: int, offset: int, nbytes: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the bytes in pieces. All pieces share one buffer, so use each before the next."""
    end = offset + nbytes
    while offset < end and (count := os.preadv(descriptor, [buffer[: end - offset]], offset)):
        offset += count
        yield buffer[:count]


def _close_gaps(path: Path, manifest: Manifest) -> None:
    """Write zeros between the tensors, where the recycled file has bytes of an older version."""
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
