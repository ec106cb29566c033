"""Which host this is (two processes with the same boot id may share a file by its path), what it lets us open, what
it takes back of our memory, and what is on its disk."""

import ctypes
import os
import resource
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

OPEN_FILES: Final = 16_384
"""Open files that a server asks the system for."""

REUSED_BYTES: Final = 32 << 20
"""A piece of memory up to this size is used again when it was freed; the most that glibc allows."""
KEPT_BYTES: Final = 64 << 20
"""Freed memory that a process keeps at the end of its heap."""

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
# As ``mallopt`` of glibc numbers them.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")


@cache
def boot_id() -> str:
    """The kernel's boot id; the host's name where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


@cache
def file_system(device: int) -> str:
    """Type of the file system that ``st_dev`` names, like "ext4"; empty where nobody says it."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in _MOUNTS.read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return kind.split()[0]
    return ""


def raise_file_limit() -> None:
    """A thousand workers are a thousand connections; many systems allow fewer open files than that by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard) if hard >= 0 else OPEN_FILES, hard))


def reuse_memory() -> None:
    """Let the frames of large messages find memory that is there already. By default what was freed goes back to the
    system, which has to zero its pages anew for the next message: half of what receiving it costs. No effect without
    glibc."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, REUSED_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
