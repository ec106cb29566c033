"""Cache of open and mapped files, for the next versions that are written into them.

Mapping a file again costs half as much as reading all of its bytes.
"""

import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_FILES = 16
"""Maximum number of files per process. A run has ``parameters.keep_versions``, one being written, and a spare."""

FileId = tuple[int, int]
"""Device and inode: the identity of a file, independent of its name."""


@dataclass(slots=True)
class _File:
    descriptor: int
    """Stays open, so that the inode number is not reused and a deletion is noticed."""
    content: mmap.mmap | None = None


class KeptMaps:
    """The most recently used ``MAX_FILES`` files that are not deleted. Thread-safe."""

    def __init__(self, prot: int, flags: int = mmap.MAP_SHARED) -> None:
        """``prot`` and ``flags``: protection and kind of the maps, as for ``mmap``."""
        self._prot = prot
        self._flags = flags
        self._kept: OrderedDict[FileId, _File] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def keep(self, status: os.stat_result, opened: Callable[[], int]) -> None:
        """Add a file without mapping it.

        ``opened`` returns a descriptor of the file, which this object then owns. Raise ``OSError`` if it fails, and
        after ``close``.
        """
        with self._lock:
            self._file(status, opened)

    def map(self, status: os.stat_result, opened: Callable[[], int]) -> mmap.mmap:
        """Return a map of a whole file, which must not be empty. Raise ``OSError`` like ``keep``, and if mapping
        fails."""
        with self._lock:
            file = self._file(status, opened)
            if file.content is None or len(file.content) != status.st_size:
                file.content = mmap.mmap(file.descriptor, status.st_size, flags=self._flags, prot=self._prot)
            return file.content

    def __contains__(self, status: os.stat_result) -> bool:
        with self._lock:
            self._forget_deleted()
            return _id(status) in self._kept

    def forget_deleted(self) -> None:
        """Drop deleted files: cached maps keep their disk space in use. Freeing a large file takes time."""
        with self._lock:
            self._forget_deleted()

    def close(self) -> None:
        """Drop all files. Views that exist stay valid."""
        with self._lock:
            self._closed = True
            for key in list(self._kept):
                self._forget(key)

    def _file(self, status: os.stat_result, opened: Callable[[], int]) -> _File:
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._forget_deleted()
        if (key := _id(status)) not in self._kept:
            descriptor = opened()
            if len(self._kept) == MAX_FILES:
                self._forget(next(iter(self._kept)))
            self._kept[key] = _File(descriptor)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _forget_deleted(self) -> None:
        for key, file in list(self._kept.items()):
            if os.fstat(file.descriptor).st_nlink == 0:
                self._forget(key)

    def _forget(self, key: FileId) -> None:
        os.close(self._kept.pop(key).descriptor)


def _id(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino
