"""Reuse of files whose pages are mapped by readers: a reader holds a file, and only files without holders are
overwritten.

A hold is a shared ``flock``. The kernel releases it with the last descriptor of that opening: with a map made of it
(which keeps a duplicate), or with the process, however that ends. A stopped process still holds its files.
"""

import errno
import fcntl
import os
import stat
from pathlib import Path

SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that mean that a good file cannot be opened or mapped at present."""


def hold(path: Path) -> int:
    """Return a descriptor for reading, held until it and every map of it are closed.

    Raise ``FileNotFoundError`` if the file does not exist, is no regular file, or is being taken at this moment.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a peer may name a pipe, whose open blocks
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(path)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise FileNotFoundError(path)  # the name belongs to another file by now
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise FileNotFoundError(path) from error
        raise
    return descriptor


def take(path: Path, target: Path) -> bool:
    """Rename an unheld file to ``target``, which no reader opens; return False and leave it if it is held.

    Also return False where holds cannot be checked: NFS locks a file only for writers, other file systems do not at
    all.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        path.replace(target)
    finally:
        os.close(descriptor)
    return True
