"""The ranks of a trainer on this machine: started together, ended together.

They are told by torchrun's variables who they are, and meet on a socket that is bound to loopback before they start.
One that dies takes the others along: without it none of them can take another step. None outlives this process,
nor does what they start.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

from staleflow.configs.ranks import LISTEN_FD
from staleflow.process import readiness
from staleflow.supervisor.drain import SAVES_S
from staleflow.supervisor.lifeline import VARIABLE, Lifeline

POLL_INTERVAL_S = 0.05
AFTERMATH_S = 3.0
"""Between the death of one rank and the end of those that do not notice."""
DRAIN_S = 5.0
"""Under a supervisor, which waits little longer, ranks have this long to end when asked."""
SAVING_S = SAVES_S - 2.0
"""Instead, once they have joined the run."""


def launch(command: Sequence[str], nproc: int, *, watched: bool) -> int:
    """Run ``command`` on ``nproc`` ranks until all have ended; returns the exit code of the first that failed, or 0.

    SIGTERM and SIGINT are passed on as SIGTERM; a second one kills. ``watched``: a supervisor started this process.
    """
    with socket.socket() as meeting, _Asked() as asked:
        meeting.bind(("127.0.0.1", 0))
        lifeline = Lifeline()
        left: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(nproc):  # one by one: those that started end with a later one that cannot
                left.append(_start(command, rank, nproc, meeting, lifeline))
            meeting.close()  # rank 0 has it
            return _until_ended(left, asked, watched=watched)
        finally:
            for started in left:
                _sweep(started)
            lifeline.close()


class _Asked:
    """Counts the signals that ask this process to end, instead of ending it."""

    def __init__(self) -> None:
        self.times = 0

    def __enter__(self) -> "_Asked":
        self._before = {number: signal.signal(number, self._count) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.times += 1


def _start(
    command: Sequence[str], rank: int, nproc: int, meeting: socket.socket, lifeline: Lifeline
) -> "subprocess.Popen[bytes]":
    """A process group of its own: Ctrl-C in a terminal reaches the launcher only, which passes it on once."""
    host, port = meeting.getsockname()
    told = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": str(host),
        "MASTER_PORT": str(port),
        VARIABLE: str(lifeline.read_fd),
    }
    passed = [lifeline.read_fd]
    if rank == 0:
        told[LISTEN_FD] = str(meeting.fileno())
        passed.append(meeting.fileno())
    return subprocess.Popen(command, env=os.environ | told, pass_fds=passed, process_group=0)


def _sweep(rank: "subprocess.Popen[bytes]") -> None:
    """Ends it and what it has started. Once: when it has been gone for long its group's number may be another's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.kill()  # it may have gone to another group
    rank.wait()


def _until_ended(left: list["subprocess.Popen[bytes]"], asked: _Asked, *, watched: bool) -> int:
    """Takes those out of ``left`` that have ended, and sweeps them."""
    ranks = tuple(left)
    failed, deadline, passed_on = 0, float("inf"), 0
    while left and time.monotonic() < deadline and asked.times < 2:
        if asked.times > passed_on:
            passed_on = asked.times
            if watched:
                deadline = time.monotonic() + (SAVING_S if readiness.has_attached() else DRAIN_S)
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    rank.send_signal(signal.SIGTERM)
        if not failed and (failed := _failed(ranks)):
            deadline = min(deadline, time.monotonic() + AFTERMATH_S)
        time.sleep(POLL_INTERVAL_S)
        for rank in [rank for rank in left if rank.poll() is not None]:
            left.remove(rank)
            _sweep(rank)
    code = failed or _failed(ranks)
    if any(rank.returncode == 2 for rank in ranks):
        return 2
    return code or 1 if left else code


def _failed(ranks: Sequence["subprocess.Popen[bytes]"]) -> int:
    """The exit code of the first rank that failed, as a shell says it; 0 for none."""
    return next((128 - code if code < 0 else code for rank in ranks if (code := rank.poll())), 0)
