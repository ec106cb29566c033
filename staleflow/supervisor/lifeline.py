"""End every child process when the supervisor ends, even after ``kill -9``.

Every child inherits the read end of one pipe, whose write end only the supervisor has. The kernel closes the pipe when
the supervisor exits for any reason. Each child then drains as after SIGTERM, and kills its process group some seconds
later.
"""

import ctypes
import os
import select
import signal
import threading
import time

VARIABLE = "STALEFLOW_LIFELINE"
"""Environment variable with the inherited descriptor, unset in a process that was started by hand.

A suffix ``:SECONDS`` means that the writer sends a byte at intervals; silence for that time counts as a closed pipe.
"""
TORCHRUN = "STALEFLOW_TORCHRUN"
"""Environment variable of ranks under torchrun: the process that started torchrun.

torchrun passes no descriptors on and starts each rank in its own session, which no signal to a process group reaches.
A rank therefore ends together with torchrun, by ``PR_SET_PDEATHSIG``.
"""
GRACE_PERIOD_S = 8.0
_PR_SET_PDEATHSIG = 1


class Lifeline:
    """The supervisor's end of the pipe."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def close(self) -> None:
        """Close the pipe, which makes every child drain."""
        os.close(self._write_fd)
        os.close(self.read_fd)


def watch_supervisor(grace_s: float = GRACE_PERIOD_S) -> bool:
    """Start watching for the supervisor's end, after which this process has ``grace_s`` to exit.

    A role calls this first. Return False if no supervisor started this process.
    """
    if starter := os.environ.pop(TORCHRUN, ""):
        _end_with_torchrun(int(starter))
        return True
    number, _, silent_s = os.environ.pop(VARIABLE, "").partition(":")
    if not number:
        return False
    descriptor = int(number)
    os.set_inheritable(descriptor, False)
    watched = descriptor, grace_s, float(silent_s or 0)
    threading.Thread(target=_watch, args=watched, name="lifeline", daemon=True).start()
    return True


def _watch(descriptor: int, grace_s: float, silent_s: float) -> None:
    while select.select((descriptor,), (), (), silent_s or None)[0] and os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.killpg(0, signal.SIGKILL)


def _end_with_torchrun(starter: int) -> None:
    """Let the kernel kill this process when its parent, torchrun, ends.

    The parent may have ended before the call to ``prctl``. Then this process has been re-parented, and the new parent
    was not started by ``starter``.
    """
    import psutil

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        parent_alive = psutil.Process(os.getppid()).ppid() == starter
    except psutil.NoSuchProcess:
        parent_alive = False
    if not parent_alive:
        os.kill(os.getpid(), signal.SIGKILL)
