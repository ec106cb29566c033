"""No rank outlives its torchrun. A few lines of Python stand in for torchrun here."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

AGENT = """
import os, pathlib, subprocess, sys
rank = subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True)
made = pathlib.Path("pids.new")
made.write_text(f"{os.getpid()} {rank.pid} {os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT']}")
made.rename("pids")
rank.wait()
"""
RANK = """
import pathlib, time
from staleflow.supervisor import lifeline
while {waits} and not pathlib.Path("go on").exists():
    time.sleep(0.02)
lifeline.watch_supervisor()
pathlib.Path("began").touch()
time.sleep(600)
"""


@contextmanager
def ranks(folder: Path, *, waits: bool) -> Generator[tuple["subprocess.Popen[bytes]", int, int]]:
    """Start one rank under a torchrun, as a machine does; yield the process and the numbers of torchrun and rank. With
    ``waits`` the rank continues only once a file exists."""
    distributed = folder / "torch" / "distributed"
    distributed.mkdir(parents=True)
    for package in (distributed.parent, distributed):
        (package / "__init__.py").touch()
    (distributed / "run.py").write_text(AGENT)
    words = [sys.executable, "-m", "staleflow.launch.ranks", "-c", RANK.format(waits=waits)]
    with subprocess.Popen(words, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}) as running:
        until(lambda: (folder / "pids").exists() or running.poll() is not None)
        agent, rank, saves_s = map(int, (folder / "pids").read_text().split())
        assert saves_s > 30, "what torchrun gives its ranks by itself"
        try:
            yield running, agent, rank
        finally:
            for pid in (agent, rank):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_rank_is_gone_when_its_torchrun_is_killed(tmp_path: Path) -> None:
    with ranks(tmp_path, waits=False) as (running, agent, rank):
        until((tmp_path / "began").exists)
        assert not gone(rank)
        os.kill(agent, signal.SIGKILL)
        until(lambda: gone(rank))
    assert running.returncode == 128 + signal.SIGKILL


def test_a_rank_whose_torchrun_was_gone_before_it_looked_does_not_begin(tmp_path: Path) -> None:
    with ranks(tmp_path, waits=True) as (running, agent, rank):
        os.kill(agent, signal.SIGKILL)
        running.wait(timeout=120)
        assert not gone(rank)
        (tmp_path / "go on").touch()
        until(lambda: gone(rank))
    assert not (tmp_path / "began").exists()
