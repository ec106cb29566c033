"""Launch the ranks of a trainer on this machine, and end them together.

The ranks receive torchrun's environment variables and rendezvous at a loopback socket that is bound before they start.
If one rank dies, the others are killed, because none of them can take another step without it. No rank, and no process
that a rank started, outlives this process.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

from staleflow.configs.ranks import LISTEN_FD
from staleflow.process import readiness
from staleflow.supervisor.drain import CHECKPOINT_TIMEOUT_S
from staleflow.supervisor.lifeline import VARIABLE, Lifeline
from staleflow.supervisor.stopping import StopSignals

POLL_INTERVAL_S = 0.05
PEER_EXIT_TIMEOUT_S = 3.0
"""Seconds between the death of one rank and the kill of ranks that have not noticed it."""
DRAIN_TIMEOUT_S = 5.0
"""Seconds that ranks have to exit after SIGTERM under a supervisor, whose own timeout is slightly longer."""
CHECKPOINT_DRAIN_TIMEOUT_S = CHECKPOINT_TIMEOUT_S - 2.0
"""The same once the ranks have attached to the run and may be writing a checkpoint."""


def launch(command: Sequence[str], nproc: int, *, watched: bool) -> int:
    """Run ``command`` on ``nproc`` ranks until all have exited. Return the exit code of the first that failed, or 0.

    SIGTERM, SIGINT and SIGHUP are forwarded as SIGTERM; a second one kills. ``watched``: a
    supervisor started this process.
    """
    with socket.socket() as meeting, StopSignals() as stop:
        meeting.bind(("127.0.0.1", 0))
        lifeline = Lifeline()
        running: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(
                nproc
            ):  # append one by one, so that `finally` sweeps the started ranks if a later one fails to start
                running.append(_start(command, rank, nproc, meeting, lifeline))
            meeting.close()  # rank 0 has inherited it
            return _until_ended(running, stop, watched=watched)
        finally:
            for started in running:
                _sweep(started)
            lifeline.close()


def _start(
    command: Sequence[str], rank: int, nproc: int, meeting: socket.socket, lifeline: Lifeline
) -> "subprocess.Popen[bytes]":
    """Start a rank in its own process group, so that Ctrl-C reaches only the launcher, which forwards it once."""
    host, port = meeting.getsockname()
    variables = {
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
        variables[LISTEN_FD] = str(meeting.fileno())
        passed.append(meeting.fileno())
    return subprocess.Popen(command, env=os.environ | variables, pass_fds=passed, process_group=0)


def _sweep(rank: "subprocess.Popen[bytes]") -> None:
    """Kill a rank and its process group.

    Call this only once and soon after the exit: later the kernel may have reused the number of the group.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.kill()  # it may have moved to another group
    rank.wait()


def _until_ended(running: list["subprocess.Popen[bytes]"], stop: StopSignals, *, watched: bool) -> int:
    """Wait for the ranks; remove the ones that exited from ``running`` and kill their process groups."""
    ranks = tuple(running)
    failed, deadline, forwarded = 0, float("inf"), False
    while running and time.monotonic() < deadline and not stop.second.is_set():
        if stop.first.is_set() and not forwarded:
            forwarded = True
            if watched:
                deadline = time.monotonic() + (
                    CHECKPOINT_DRAIN_TIMEOUT_S if readiness.has_attached() else DRAIN_TIMEOUT_S
                )
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    rank.send_signal(signal.SIGTERM)
        if not failed and (failed := _failed(ranks)):
            deadline = min(deadline, time.monotonic() + PEER_EXIT_TIMEOUT_S)
        time.sleep(POLL_INTERVAL_S)
        for rank in [rank for rank in running if rank.poll() is not None]:
            running.remove(rank)
            _sweep(rank)
    code = failed or _failed(ranks)
    if any(rank.returncode == 2 for rank in ranks):
        return 2
    return code or 1 if running else code


def _failed(ranks: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Return the exit code of the first rank that failed, with 128 + signal number as in a shell; 0 if none failed."""
    return next((128 - code if code < 0 else code for rank in ranks if (code := rank.poll())), 0)
