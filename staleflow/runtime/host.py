"""Which host this is: two processes with the same boot id may share a file by its path."""

import socket
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def boot_id() -> str:
    """The kernel's boot id; the host's name where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
