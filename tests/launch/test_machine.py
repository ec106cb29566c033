"""A machine manages its processes; the tests start none."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

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
    with pytest.raises(RuntimeError):
        Machine([], tmp_path, "tcp://127.0.0.1:1", "rollout").run()
    assert ended == ["drain", "lifeline"]
