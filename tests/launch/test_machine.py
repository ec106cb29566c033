"""What a machine does with its processes, without any."""

from pathlib import Path

import pytest

from staleflow.launch import machine
from staleflow.launch.machine import Machine
from staleflow.supervisor.lifeline import Lifeline


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
