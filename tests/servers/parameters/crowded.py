"""A folder of versions on a simulated small disk."""

import errno
import os
from pathlib import Path

import pytest


def holds(patched: pytest.MonkeyPatch, folder: Path, nbytes: int) -> None:
    """Limit the total size of the folder's files to ``nbytes``."""
    allocate = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        if sum(map(_size, (path for path in folder.iterdir() if path.suffix in (".bin", ".part")))) > nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, length)

    patched.setattr(os, "posix_fallocate", full)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a thread removes discarded files concurrently
        return 0
