"""The files that this process has open."""

import os
from contextlib import suppress
from pathlib import Path


def open_files(prefix: str | Path) -> int:
    """Count open files whose path begins with ``prefix``, including deleted ones; files that other tests left open do
    not count."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of this listing itself
            found += os.readlink(f"/proc/self/fd/{name}").startswith(str(prefix))
    return found
