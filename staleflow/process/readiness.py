"""What a process tells the supervisor that started it: when it has joined the run."""

import os
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "STALEFLOW_SUPERVISED"
"""Environment: a file to be told in. Set in the processes that a supervisor starts, and in those that these start."""
SLOT_VARIABLE = "STALEFLOW_SLOT"
"""Environment: a secret of the place that a process fills, kept when the supervisor restarts it."""


def slot() -> str:
    """Return the secret by which the scheduler knows this process as the successor of another; empty without one."""
    return os.environ.get(SLOT_VARIABLE, "")


def tell_attached() -> None:
    """The run has taken this process: from now on it works, where before it loaded."""
    if file := os.environ.get(VARIABLE):
        with suppress(OSError):  # the supervisor takes it for one that still loads
            Path(file).write_text(str(time.monotonic()))


def has_attached() -> bool:
    """Whether a process with the same supervisor's file, such as a rank below this one, has told so."""
    return attached_at(Path(os.environ.get(VARIABLE, ""))) is not None


def attached_at(file: Path) -> float | None:
    """When the process that was given this file has told so, in monotonic seconds; None: it has not."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return None
