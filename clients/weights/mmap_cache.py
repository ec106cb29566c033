"""Files that stay open and mapped, for the next versions that are written into them: to map a file anew costs half as
much as to look at all of its bytes."""

import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

KEPT = 16
"""Files of one process at most. A run has ``parameters.keep_versions``, one that is written, and a spare one."""

FileId = tuple[int, int]
"""Device and inode: which file it is, whatever its name."""


@dataclass(slots=True)
class _File:
    descriptor: int
    """Open: nobody else can have its number, and it is known when it is deleted."""
    content: mmap.mmap | None = None


class KeptMaps:
    """The last ``KEPT`` files, unless they are deleted. Safe to use from several threads."""

    def __init__(self, prot: int) -> None:
        """``prot``: how they are mapped, as ``mmap`` names it."""
        self._prot = prot
        self._kept: OrderedDict[FileId, _File] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def keep(self, status: os.stat_result, opened: Callable[[], int]) -> None:
        """A file, not mapped yet. ``opened`` gives a descriptor of it, which belongs to this object then. ``OSError``
        where there is none, and after ``close``."""
        with self._lock:
            self._file(status, opened)

    def map(self, status: os.stat_result, opened: Callable[[], int]) -> mmap.mmap:
        """The whole of a file that is not empty. ``OSError`` as ``keep``, and where it cannot be mapped."""
        with self._lock:
            file = self._file(status, opened)
            if file.content is None or len(file.content) != status.st_size:
                file.content = mmap.mmap(file.descriptor, status.st_size, prot=self._prot)
            return file.content

    def __contains__(self, status: os.stat_result) -> bool:
        with self._lock:
            self._forget_deleted()
            return _id(status) in self._kept

    def forget_deleted(self) -> None:
        """What is kept keeps the room of a file that is deleted. Giving it back takes time where it is large."""
        with self._lock:
            self._forget_deleted()

    def close(self) -> None:
        """Keep nothing beyond what somebody still has a view of."""
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
            if len(self._kept) == KEPT:
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
