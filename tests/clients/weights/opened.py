"""Which files this process has open."""

import os
from contextlib import suppress
from pathlib import Path


def open_files(prefix: str | Path) -> int:
    """Descriptors of files whose path begins so, deleted ones among them; what other tests left open is not counted."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of this look
            found += os.readlink(f"/proc/self/fd/{name}").startswith(str(prefix))
    return found
