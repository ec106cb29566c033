"""Ranks as processes that are forked from one that has imported torch and the trainer, which takes seven seconds."""

import functools
import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from unittest import mock

from staleflow.configs.ranks import LISTEN_FD

PRELOADED = ["tests.clients.trainer.rank_process"]


class Rank:
    """The process of one rank."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    def wait(self, limit_s: float) -> int:
        """Wait for the exit; return the exit code."""
        self._process.join(limit_s)
        code = self._process.exitcode
        assert code is not None, f"a rank still runs after {limit_s} s"
        return code

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}):
        forkserver.ensure_running()
    return context


def start_rank(rank: int, nproc: int, meeting: socket.socket, module: str, words: Sequence[str], output: Path) -> Rank:
    """Start ``main`` of a module with these arguments as one of ``nproc`` ranks.

    The first rank inherits the socket, so no other process can take its port in between.
    """
    host, port = meeting.getsockname()
    told: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc}
    told |= {"MASTER_ADDR": host, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    variables = {name: str(value) for name, value in told.items()}
    given = (module, list(words), variables, output, meeting if rank == 0 else None)
    process = _server().Process(target=_run, args=given, daemon=True)
    process.start()
    return Rank(process)


def _run(module: str, words: list[str], variables: dict[str, str], output: Path, meeting: socket.socket | None) -> None:
    with output.open("wb") as opened:
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    os.environ |= variables
    if meeting is not None:
        os.environ[LISTEN_FD] = str(meeting.detach())
    sys.argv[1:] = words
    code = 1
    try:
        importlib.import_module(module).main()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as in every role: a torch teardown aborts at times, while one of its threads still runs
