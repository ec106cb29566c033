"""Errors of a disk that takes no writes: full, read-only, or failing. The one place that names these errors.

A server then refuses writes with ``busy``, serves its data, and continues once the disk takes writes again.
"""

import errno
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, Literal

log = logging.getLogger(__name__)

State = Literal["disk", "read-only", "failing"]
"""Reason why a disk takes no writes: no room, a read-only file system, or an input/output error."""
Resource = Literal["", "map", "disk", "read-only", "failing"]
"""The exhausted resource that blocks a server's writes; "" for none. ``map`` is the limit of the configuration."""

_STATES: Final[dict[int, State]] = {
    errno.ENOSPC: "disk",
    errno.EDQUOT: "disk",
    errno.EFBIG: "disk",
    errno.EROFS: "read-only",
    errno.EIO: "failing",
}
_DESCRIPTIONS: Final[dict[str, str]] = {
    "map": "map is full",
    "disk": "disk is full",
    "read-only": "file system is read-only",
    "failing": "disk fails (input/output error)",
}


class Scarce(OSError):
    """No descriptor or memory is available to read or write a file. Temporary."""


def state_of(error: BaseException) -> State | None:
    """Return why the disk took no write, or None for an error of another kind. LMDB has the reason in its text only."""
    if isinstance(error, OSError):
        return _STATES.get(error.errno or 0)
    text = str(error)
    return next((state for number, state in _STATES.items() if os.strerror(number) in text), None)


def trouble(resource: str) -> str:
    """Describe the problem of a resource, as the predicate of a sentence about its server."""
    return _DESCRIPTIONS.get(resource, f"{resource} is full")


@contextmanager
def spared(what: str) -> Generator[None]:
    """Skip work that the disk does not allow at present, such as a delete, and log it."""
    try:
        yield
    except OSError as error:
        if state_of(error) is None:
            raise
        log.debug("%s: %s", what, error.strerror)
