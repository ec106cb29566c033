"""Files that stay mapped, for the next versions that are written into them: to map a file anew costs half as much as to
look at all of its bytes."""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

KEPT = 4
"""Files of one process: those of two versions in use, one that is written, and a spare one."""


class FileId(NamedTuple):
    """Which file it is, whatever its name."""

    device: int
    inode: int


def file_id(status: os.stat_result) -> FileId:
    """Of ``os.stat``."""
    return FileId(status.st_dev, status.st_ino)


class KeptMaps:
    """The last ``KEPT`` files, unless they are deleted. Safe to use from several threads."""

    def __init__(self, prot: int) -> None:
        """``prot``: how they are mapped, as ``mmap`` names it."""
        self._prot = prot
        self._kept: OrderedDict[FileId, tuple[mmap.mmap, int]] = OrderedDict()
        """The map, and a descriptor that tells whether the file is deleted."""
        self._lock = threading.Lock()

    def map(self, status: os.stat_result, opened: Callable[[], int]) -> mmap.mmap:
        """The whole file, which is not empty. ``opened`` gives a descriptor of it, which belongs to this object then.
        ``OSError`` where it cannot be opened or mapped."""
        key = file_id(status)
        with self._lock:
            self._forget_deleted()
            if key in self._kept and len(self._kept[key][0]) != status.st_size:
                self._forget(key)
            if key not in self._kept:
                if len(self._kept) == KEPT:
                    self._forget(next(iter(self._kept)))
                self._kept[key] = self._mapped(opened(), status.st_size)
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def forget_deleted(self) -> None:
        """A map keeps the room of a file that is deleted."""
        with self._lock:
            self._forget_deleted()

    def close(self) -> None:
        """Keep nothing mapped beyond what somebody still has a view of."""
        with self._lock:
            for key in list(self._kept):
                self._forget(key)

    def _mapped(self, descriptor: int, nbytes: int) -> tuple[mmap.mmap, int]:
        try:
            return mmap.mmap(descriptor, nbytes, prot=self._prot), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def _forget_deleted(self) -> None:
        for key, (_, descriptor) in list(self._kept.items()):
            if os.fstat(descriptor).st_nlink == 0:
                self._forget(key)

    def _forget(self, key: FileId) -> None:
        _, descriptor = self._kept.pop(key)
        os.close(descriptor)
