"""Properties of this host: identity (two processes with the same boot id may share a file by its path), open-file
limit, reuse of freed memory, and file system types."""

import ctypes
import os
import resource
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

MIN_OPEN_FILES: Final = 16_384
"""Open files that a server requests from the system."""

REUSED_BYTES: Final = 32 << 20
"""Freed blocks of memory up to this size are reused; the maximum that glibc allows."""
KEPT_BYTES: Final = 64 << 20
"""Freed memory that a process keeps at the end of its heap."""

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
# Option numbers of ``mallopt`` in glibc.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@cache
def boot_id() -> str:
    """Return the kernel's boot id; the host's name where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def usable_cores(quota_file: Path = _CPU_QUOTA) -> int:
    """Return the number of processors that this process may use, at most the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no cgroup v2, or "max": no quota
        quota, period = map(int, quota_file.read_text().split())
        cores = max(1, min(cores, quota // period))
    return cores


@cache
def file_system(device: int) -> str:
    """Return the type of the file system that ``st_dev`` names, like "ext4"; empty if unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in _MOUNTS.read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return kind.split()[0]
    return ""


def raise_file_limit() -> None:
    """Raise the limit of open files: a thousand workers are a thousand connections, beyond the default of many
    systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(MIN_OPEN_FILES, hard) if hard >= 0 else MIN_OPEN_FILES, hard))


def reuse_memory() -> None:
    """Keep freed memory for the frames of further large messages. By default it returns to the system, which has to
    zero new pages for the next message: half of the cost of receiving it. No effect without glibc."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, REUSED_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
