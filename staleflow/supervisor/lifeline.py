"""Nobody outlives the supervisor, however it ends.

Every child inherits the read end of one pipe whose write end only the supervisor has. When it closes, by exit or by
``kill -9``, each child drains as at SIGTERM, and is gone with its whole process group some seconds later.
"""

import ctypes
import os
import select
import signal
import threading
import time

VARIABLE = "STALEFLOW_LIFELINE"
"""Environment: number of the inherited descriptor, and ``:SECONDS`` where a byte comes now and then: without one for so
long it has as good as closed. Unset in a process that a person started."""
TORCHRUN = "STALEFLOW_TORCHRUN"
"""Environment of the ranks under torchrun: the process that started it. torchrun passes on no descriptor, and gives
each rank a session of its own, so no signal to a group reaches it: a rank ends with torchrun, at once."""
GRACE_S = 8.0
_PR_SET_PDEATHSIG = 1


class Lifeline:
    """The supervisor's end."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def close(self) -> None:
        """Lets go of every child."""
        os.close(self._write_fd)
        os.close(self.read_fd)


def hold(grace_s: float = GRACE_S) -> bool:
    """Called first thing by a role: watch for the supervisor's end, after which it has ``grace_s``. False if there is
    none."""
    if starter := os.environ.pop(TORCHRUN, ""):
        _end_with_torchrun(int(starter))
        return True
    number, _, silent_s = os.environ.pop(VARIABLE, "").partition(":")
    if not number:
        return False
    descriptor = int(number)
    os.set_inheritable(descriptor, False)
    told = descriptor, grace_s, float(silent_s or 0)
    threading.Thread(target=_watch, args=told, name="lifeline", daemon=True).start()
    return True


def _watch(descriptor: int, grace_s: float, silent_s: float) -> None:
    while select.select((descriptor,), (), (), silent_s or None)[0] and os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.killpg(0, signal.SIGKILL)


def _end_with_torchrun(starter: int) -> None:
    """The kernel ends this process with its parent. A parent that was gone before is told by who started it."""
    import psutil

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        there = psutil.Process(os.getppid()).ppid() == starter
    except psutil.NoSuchProcess:
        there = False
    if not there:
        os.kill(os.getpid(), signal.SIGKILL)
