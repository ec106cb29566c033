"""Which host this is (two processes with the same boot id may share a file by its path), and what it lets us open."""

import resource
import socket
from functools import cache
from pathlib import Path
from typing import Final

OPEN_FILES: Final = 16_384
"""Open files that a server asks the system for."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def boot_id() -> str:
    """The kernel's boot id; the host's name where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def raise_file_limit() -> None:
    """A thousand workers are a thousand connections; many systems allow fewer open files than that by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard) if hard >= 0 else OPEN_FILES, hard))
