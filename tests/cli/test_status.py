"""``staleflow status`` prints the state of a run whose scheduler replies."""

from pathlib import Path

import pytest

from staleflow.cli.main import main
from staleflow.configs.loading.load import load, write_resolved
from staleflow.protocols.wire.messages import SchedulerStatus
from tests.cli.conftest import SIMULATED
from tests.monitor.world import STATUS


class Answers:
    """Replaces the connection to the scheduler."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status_of(self, *_: object, **__: object) -> SchedulerStatus:
        return STATUS


def test_a_run_is_called_by_its_name_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_resolved(load(SIMULATED), tmp_path / "it-1")
    monkeypatch.setattr("staleflow.clients.admin.Admin", Answers)
    monkeypatch.setattr("staleflow.supervisor.addresses.may_answer", lambda _: True)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    monkeypatch.chdir(tmp_path / "it-1")
    assert main(["status", "."]) == 0
    assert "it-1" in capsys.readouterr().out.splitlines()[0]
