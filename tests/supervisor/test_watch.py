"""Watching reports new lines of a growing file and the newest status of a scheduler."""

import time
from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.protocols.wire.messages import SchedulerStatus, Status
from staleflow.supervisor import watch
from staleflow.supervisor.watch import NewLines, StatusWatch


def test_a_run_of_another_staleflow_is_an_error_of_whoever_looks_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other:
        def __init__(self, *_: object, **__: object) -> None: ...
        def close(self) -> None: ...
        def status_of(self, kind: type[Status], timeout_s: float) -> Status:
            raise ConfigError("protocol of ipc:///run", 5, "this client speaks 6")

    monkeypatch.setattr(watch, "Admin", Other)

    def ask(asking: StatusWatch[SchedulerStatus], limit: float) -> None:
        while time.monotonic() < limit:
            assert asking.newest is None

    with (
        StatusWatch(SchedulerStatus, "ipc:///run") as asking,
        pytest.raises(ConfigError, match="is 5; this client speaks 6"),
    ):
        ask(asking, time.monotonic() + 120)


def test_each_whole_line_is_taken_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    new = NewLines(path)
    assert new.take() == ()
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert new.take() == ({"step": 0}, {"step": 1})
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert new.take() == ({"step": 2},)
    assert new.take() == ()
