"""Folders in shared memory for the files of a folder on disk. They survive the death of a process, but no reboot.

A folder is named after the folder on disk, whose owner alone may use it, and only this user may read it. It also names
that folder, by which the remains of killed processes are found. The process that uses a folder locks it: containers may
share /dev/shm and nothing else, so the folder on disk may seem to be gone, or may be another one with the same path.
"""

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from staleflow.process.host import file_system

SHARED_MEMORY = Path("/dev/shm")
_DISK_FOLDER = "disk-folder"
"""File with the path of the folder on disk."""


class Unusable(Exception):
    """No folder can be made in shared memory."""


def path_of(folder: Path) -> Path:
    """Return the folder in shared memory that belongs to ``folder`` on disk. It may not exist."""
    digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    return SHARED_MEMORY / f"{_prefix()}{digest}"


def create(folder: Path) -> Path:
    """Create the folder in shared memory, or return the existing one. Raise ``Unusable``."""
    path = path_of(folder)
    try:
        if file_system(SHARED_MEMORY.stat().st_dev) != "tmpfs":
            raise Unusable(f"{SHARED_MEMORY} is not in memory")
        path.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(path):
            raise Unusable(f"{path} belongs to another user, or is no folder of this one alone: delete it")
        (path / _DISK_FOLDER).write_bytes(os.fsencode(folder.resolve()))
    except OSError as error:
        raise Unusable(f"{error.filename or path}: {error.strerror}") from error
    return path


def lock(path: Path) -> int:
    """Lock a folder in shared memory; return the descriptor that holds the lock. Raise ``Unusable`` if it is locked, or
    has just been removed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Unusable(f"another process uses {path}, perhaps in a container with the same {SHARED_MEMORY}") from None
    return descriptor


def clear(path: Path) -> None:
    """Delete all files but the name of the folder on disk."""
    for file in path.iterdir():
        if file.name != _DISK_FOLDER:
            file.unlink()


def remove(folder: Path) -> bool:
    """Delete the folder in shared memory that belongs to ``folder`` on disk, if it is this user's and no process uses
    it. Return False if it stays, or does not exist."""
    with suppress(OSError, Unusable):
        if _is_private(path := path_of(folder)):
            descriptor = lock(path)
            try:
                shutil.rmtree(path)
                return True
            finally:
                os.close(descriptor)
    return False


def disk_folders() -> Iterator[Path]:
    """Yield the folders on disk for which this user has folders in shared memory."""
    for path in SHARED_MEMORY.glob(f"{_prefix()}*"):
        with suppress(OSError):
            if _is_private(path):
                folder = Path(os.fsdecode((path / _DISK_FOLDER).read_bytes()))
                if path_of(folder) == path:
                    yield folder


def _prefix() -> str:
    return f"staleflow-{os.getuid()}-"


def _is_private(path: Path) -> bool:
    """Return True for a real folder that only this user can open. Other users may create files in shared memory."""
    info = path.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077
