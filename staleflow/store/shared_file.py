"""Files whose pages are used again: who reads one holds it, and only one that nobody holds is overwritten.

A hold is a shared ``flock``. The kernel ends it with the last descriptor of that opening: with a map that was made of
it (which keeps a duplicate), or with the process, however that ends. A process that is merely stopped still holds.
"""

import errno
import fcntl
import os
import stat
from pathlib import Path

SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Why a file that is whole may not be opened or mapped at present."""


def hold(path: Path) -> int:
    """A descriptor to read the file by, held until it and every map of it are closed.

    ``FileNotFoundError`` when there is none, it is no plain file, or it is being taken this moment.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a peer may name a pipe, where open waits
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(path)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise FileNotFoundError(path)  # another file has the name by now
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise FileNotFoundError(path) from error
        raise
    return descriptor


def take(path: Path, target: Path) -> bool:
    """Rename the file, which nobody may read under its new name, if nobody holds it; else leave it, False.

    False as well where nobody can know: NFS locks a file only for who may write it, other file systems do not at all.
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
