"""A machine manages its processes; the tests start none."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest

from staleflow.launch import machine
from staleflow.launch.machine import Machine
from staleflow.supervisor.children import Restarts
from staleflow.supervisor.lifeline import Lifeline
from staleflow.supervisor.roles import Kind, Role


def test_a_machine_that_cannot_start_a_process_again_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A failed start counts even if the process ended well the last time that it ran."""
    popen, started = subprocess.Popen[bytes], list[bool]()

    def once(*words: Any, **more: Any) -> "subprocess.Popen[bytes]":
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(True)
        return popen(*words, **more)

    def goes_on(*_: object, **__: object) -> bool:
        return False

    monkeypatch.setattr(subprocess, "Popen", once)
    monkeypatch.setattr(machine, "has_ended", goes_on)
    monkeypatch.setattr(Restarts, "CAP_S", 0.0)
    role = Role(name="rollout-0", kind=Kind.WORKER, command=(sys.executable, "-c", "pass"))
    assert Machine([role], tmp_path, "tcp://127.0.0.1:1", "rollout").run() == 1
    assert "rollout-0 could not be restarted" in capfd.readouterr().out


def test_a_machine_that_cannot_start_a_process_at_all_says_so_and_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", never)
    role = Role(name="rollout-0", kind=Kind.WORKER, command=(sys.executable, "-c", "pass"))
    assert Machine([role], tmp_path, "tcp://127.0.0.1:1", "rollout").run() == 1
    said = "rollout-0 could not be started: [Errno 11] Resource temporarily unavailable\n"
    assert capfd.readouterr().out == said


def test_a_machine_lets_go_of_its_processes_whatever_its_end_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, close = list[str](), Lifeline.close

    def closes(lifeline: Lifeline) -> None:
        close(lifeline)
        ended.append("lifeline")

    def fails(*_: object) -> None:
        ended.append("drain")
        raise RuntimeError

    monkeypatch.setattr(Lifeline, "close", closes)
    monkeypatch.setattr(machine, "drain", fails)
    role = Role(name="rollout-0", kind=Kind.WORKER, command=("/none/such",))  # it cannot start, so the machine ends
    with pytest.raises(RuntimeError):
        Machine([role], tmp_path, "tcp://127.0.0.1:1", "rollout").run()
    assert ended == ["drain", "lifeline"]


def test_a_machine_runs_the_workers_that_the_scheduler_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The scheduler lets the first worker go and wants the spare one; then the run ends."""

    class Watch:
        """Answers of a scheduler: the next one at each exit of a worker."""

        answers: ClassVar = [(("rollout-1",), False), (("rollout-1",), True)]
        wanted, ended = ("rollout-0",), False

        def __init__(self, connect: str) -> None:
            assert connect == "tcp://127.0.0.1:1"

        def __enter__(self) -> "Watch":
            return self

        def __exit__(self, *_: object) -> None: ...

        def poll_now(self) -> None:
            self.wanted, self.ended = self.answers.pop(0)

    def ends(*_: object, **__: object) -> bool:
        return True

    monkeypatch.setattr(machine, "WantedWatch", Watch)
    monkeypatch.setattr(machine, "has_ended", ends)
    command = (sys.executable, "-c", "pass")
    first, second = (
        Role(name=f"rollout-{number}", kind=Kind.WORKER, command=command, elastic=True, spare=number > 0)
        for number in range(2)
    )
    assert Machine([first, second], tmp_path, "tcp://127.0.0.1:1", "rollout").run() == 0
    assert capfd.readouterr().out.splitlines() == [
        "rollout-0 started",
        "rollout-0 has left (rollout workers wanted: 1)",
        "rollout-1 started",
    ]
