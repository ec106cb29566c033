"""Simulated exhaustion of system resources."""

import errno
import os
import resource
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_descriptor() -> Generator[None]:
    """Let this process open no more descriptors; open ones stay open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def no_room(*_: object, **__: object) -> None:
    """Replacement for a function of ``os``: fails because the disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
