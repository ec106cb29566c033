"""What a system is like that has nothing left to give."""

import errno
import os
import resource
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_descriptor() -> Generator[None]:
    """This process opens nothing; what it has open stays so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def no_room(*_: object, **__: object) -> None:
    """In place of a call of ``os``: the disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
