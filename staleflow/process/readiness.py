"""Readiness: a process reports to its supervisor that it has attached to the run."""

import os
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "STALEFLOW_SUPERVISED"
"""Environment variable: file to report in. Set in the processes that a supervisor starts, and in their children."""
SLOT_VARIABLE = "STALEFLOW_SLOT"
"""Environment variable: secret of a process's slot, kept when the supervisor restarts the process."""


def slot() -> str:
    """Return the secret by which the scheduler recognizes this process as the successor of another; empty without
    one."""
    return os.environ.get(SLOT_VARIABLE, "")


def report_attached() -> None:
    """Report that this process is attached: from now on it works, where before it loaded."""
    if file := os.environ.get(VARIABLE):
        with suppress(OSError):  # on failure the supervisor treats the process as still loading
            Path(file).write_text(str(time.monotonic()))


def has_attached() -> bool:
    """Return whether a process with the same report file, such as a rank below this one, has attached."""
    return attached_at(Path(os.environ.get(VARIABLE, ""))) is not None


def attached_at(file: Path) -> float | None:
    """Return when the process with this report file attached, in monotonic seconds, or None if it has not."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return None
