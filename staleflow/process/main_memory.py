"""Main memory that this process can still use."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
"""Mount of the version 2 control group; in a container, its own."""


def available(cgroup: Path = _CGROUP) -> int:
    """Return bytes available without swapping, within the limit of the container."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
        cache = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())["inactive_file"]
    except (OSError, ValueError, KeyError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used + int(cache)))
