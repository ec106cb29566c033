"""The ranks of a trainer start together and end together. The ranks here are a few lines of Python."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from staleflow.process import readiness
from staleflow.supervisor.launch import launch

LIMIT_S = 120.0

LAUNCHER = """
import sys
from staleflow.supervisor.launch import launch
sys.exit(launch((sys.executable, "-c", sys.argv[1]), 2, watched=len(sys.argv) > 2))
"""


def ranks(code: str, nproc: int = 2) -> int:
    return launch((sys.executable, "-c", code), nproc, watched=False)


def started(code: str, *more: str) -> "subprocess.Popen[bytes]":
    """Start a launcher of two such ranks, in a process of its own."""
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, code, *more])


def pids(folder: Path, count: int = 2) -> list[int]:
    """Process numbers of the ranks, once each rank has written its own."""
    deadline = time.monotonic() + LIMIT_S
    while len(found := [int(path.name) for path in folder.iterdir()]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def gone(pid: int) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_every_rank_is_told_who_it_is_and_the_first_has_the_socket_that_all_meet_on(tmp_path: Path) -> None:
    code = f"""
import os, socket, time
rank, port = os.environ["RANK"], int(os.environ["MASTER_PORT"])
assert os.environ["MASTER_ADDR"] == "127.0.0.1" and os.environ["LOCAL_RANK"] == rank
if rank == "0":
    listening = socket.socket(fileno=int(os.environ["STALEFLOW_RANKS_FD"]))
    assert listening.getsockname() == ("127.0.0.1", port)
    listening.listen()
    listening.accept()[0].sendall(b"met")
else:
    assert "STALEFLOW_RANKS_FD" not in os.environ
    while True:
        try:
            assert socket.create_connection(("127.0.0.1", port)).recv(3) == b"met"
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
open(os.path.join({str(tmp_path)!r}, rank + "-of-" + os.environ["WORLD_SIZE"]), "w").close()
"""
    assert ranks(code) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-of-2", "1-of-2"]


@pytest.mark.parametrize(("how", "code"), [("sys.exit(3)", 3), ("sys.exit(2)", 2), ("os.kill(os.getpid(), 9)", 137)])
def test_a_rank_that_dies_takes_the_others_along_and_gives_the_exit_code(how: str, code: int) -> None:
    began = time.monotonic()
    assert ranks(f"import os, sys, time\nif os.environ['RANK'] == '1': {how}\ntime.sleep(600)") == code
    assert time.monotonic() - began < LIMIT_S


def test_what_a_rank_has_started_ends_with_the_launch(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(os.path.join({str(tmp_path)!r}, str(child.pid)), "w").close()
while len(os.listdir({str(tmp_path)!r})) < 2:
    time.sleep(0.01)
sys.exit(3)
"""
    assert ranks(code) == 3
    assert all(gone(pid) for pid in pids(tmp_path))


def test_the_group_of_a_rank_is_killed_once_and_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 stays until the group of rank 0 has been killed."""
    killed, killpg = list[int](), os.killpg
    first = tmp_path / "first"

    def noted(group: int, number: int) -> None:
        assert group not in killed
        killed.append(group)
        first.touch()
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", noted)
    code = f"""
import os, sys, time
deadline = time.monotonic() + 120
while os.environ["RANK"] == "1" and not os.path.exists({str(first)!r}):
    if time.monotonic() > deadline:
        sys.exit(1)
    time.sleep(0.02)
"""
    assert ranks(code) == 0
    assert len(killed) == 2


def test_a_rank_that_cannot_be_started_takes_those_before_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    first, popen = list["subprocess.Popen[bytes]"](), subprocess.Popen[bytes]

    def start(*words: Any, **more: Any) -> "subprocess.Popen[bytes]":
        if first:
            raise BlockingIOError
        first.append(popen(*words, **more))
        return first[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(BlockingIOError):
        ranks("import time; time.sleep(600)")
    assert [rank.returncode for rank in first] == [-signal.SIGKILL]


def test_a_signal_is_passed_on_once_and_ranks_may_take_their_time(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys, time
def last(number, frame):
    time.sleep(0.3)
    open(os.path.join({str(tmp_path)!r}, f"ended-{{os.environ['RANK']}}-{{number}}"), "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, last)
open(os.path.join({str(tmp_path)!r}, str(os.getpid())), "w").close()
time.sleep(600)
"""
    launcher = started(code)
    pids(tmp_path)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(LIMIT_S) == 0
    assert sorted(path.name for path in tmp_path.glob("ended-*")) == ["ended-0-15", "ended-1-15"]


DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.path.join({folder!r}, str(os.getpid())), "w").close()
time.sleep(600)
"""


def test_a_second_signal_kills(tmp_path: Path) -> None:
    launcher = started(DEAF.format(folder=str(tmp_path)))
    found = pids(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(LIMIT_S) != 0
    assert all(gone(pid) for pid in found)


def test_under_a_supervisor_ranks_that_do_not_end_are_killed_in_time(tmp_path: Path) -> None:
    launcher = started(DEAF.format(folder=str(tmp_path)), "watched")
    found = pids(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) != 0
    assert all(gone(pid) for pid in found)


def test_under_a_supervisor_ranks_that_have_joined_have_time_to_save(tmp_path: Path) -> None:
    ranks = f"""
import os, signal, sys, time
from staleflow.process import readiness
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit(0)))
readiness.report_attached()
open(os.path.join({str(tmp_path)!r}, str(os.getpid())), "w").close()
time.sleep(600)
"""
    quick = LAUNCHER.replace(
        "sys.exit", "from staleflow.supervisor import launch as of\nof.DRAIN_TIMEOUT_S = 0.2\nsys.exit"
    )
    words = [sys.executable, "-c", quick, ranks, "watched"]
    with tempfile.NamedTemporaryFile() as told:
        launcher = subprocess.Popen(words, env={**os.environ, readiness.VARIABLE: told.name})
        pids(tmp_path)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(LIMIT_S) == 0


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, time
from staleflow.supervisor import lifeline
assert lifeline.watch_supervisor()
open(os.path.join({str(tmp_path)!r}, str(os.getpid())), "w").close()
time.sleep(600)
"""
    launcher = started(code)
    found = pids(tmp_path)
    launcher.kill()
    launcher.wait(LIMIT_S)
    assert all(gone(pid) for pid in found)
