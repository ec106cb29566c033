"""Nobody outlives the supervisor, however it ends.

Every child inherits the read end of one pipe whose write end only the supervisor has. When it closes, by exit or by
``kill -9``, each child drains as at SIGTERM, and is gone with its whole process group some seconds later.
"""

import os
import signal
import threading
import time

VARIABLE = "STALEFLOW_LIFELINE"
"""Environment: number of the inherited descriptor. Unset in a process that a person started."""
GRACE_S = 8.0


class Lifeline:
    """The supervisor's end."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def close(self) -> None:
        """Lets go of every child."""
        os.close(self._write_fd)
        os.close(self.read_fd)


def hold() -> bool:
    """Called first thing by a role: watch for the supervisor's end. False if there is none."""
    number = os.environ.pop(VARIABLE, "")
    if not number:
        return False
    descriptor = int(number)
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_watch, args=(descriptor,), name="lifeline", daemon=True).start()
    return True


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)
