"""A source follows a running service across restarts, from its directory or from its address alone."""

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from staleflow.monitor import sources
from staleflow.monitor.history import History
from staleflow.monitor.model import board
from staleflow.monitor.sources import Live
from staleflow.process import hung_files
from staleflow.protocols.wire.messages import ParametersStatus, SchedulerStatus, Status
from tests.monitor.test_screen import SUMMARY
from tests.monitor.world import STATUS


class Watch:
    """Stands in for a thread that queries a server."""

    answers: dict[str, Status]
    age_s = 0.0

    def __init__(self, kind: type[Status], address: str, *_: object, **__: object) -> None:
        self._address = address

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    @property
    def newest(self) -> Status | None:
        return self.answers.get(self._address)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Status]:
    Watch.answers, Watch.age_s = {}, 0.0
    monkeypatch.setattr(sources, "StatusWatch", Watch)
    monkeypatch.setattr(hung_files, "PATIENCE_S", 30.0)  # a read on a loaded machine may take long
    return Watch.answers


def test_nothing_is_claimed_before_the_first_answer(answers: dict[str, Status]) -> None:
    live = Live("tcp://far:1")
    shot = live.snapshot()
    assert (live.name, live.answered, shot.phase, shot.status) == (
        "tcp://far:1",
        False,
        "no answer yet",
        SchedulerStatus(),
    )


def test_the_scheduler_says_where_the_parameter_server_and_the_run_directory_are(
    answers: dict[str, Status], tmp_path: Path
) -> None:
    (tmp_path / "trace.jsonl").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"loss":0.5}\n')
    live = Live("tcp://near:1")
    answers["tcp://near:1"] = structs.replace(STATUS, run_s=50.0, run_dir=str(tmp_path), parameters="tcp://near:2")
    answers["tcp://near:2"] = ParametersStatus()
    shot = live.snapshot()
    assert (live.name, live.trace, live.complete) == (tmp_path.name, tmp_path / "trace.jsonl", True)
    assert (shot.phase, shot.lines, shot.parameters) == ("running", ({"step": 1, "loss": 0.5},), ParametersStatus())
    assert 50.0 <= shot.elapsed_s < 60.0


def test_a_directory_that_is_on_another_machine_is_out_of_reach(answers: dict[str, Status], tmp_path: Path) -> None:
    answers["tcp://far:1"] = structs.replace(STATUS, run_dir=str(tmp_path / "there"))
    live = Live("tcp://far:1")
    assert live.snapshot().lines == ()
    assert (live.name, live.trace) == ("there", None)


def test_a_run_that_came_to_its_end_is_not_waited_for(answers: dict[str, Status], tmp_path: Path) -> None:
    live = Live("a", tmp_path)
    answers["a"], Watch.age_s = STATUS, 9.0
    assert (live.snapshot().phase, live.snapshot().ended) == ("no answer", ""), "it may come back"
    (tmp_path / "summary.json").write_bytes(msgspec.json.encode(SUMMARY))
    shot = live.snapshot()
    said = f"the run has ended: finished, 100 of 100 steps; details: staleflow report {tmp_path}"
    assert (shot.phase, shot.ended, board("run", shot, History()).why) == ("finished", said, said)
    Watch.age_s = 0.5
    assert live.snapshot().phase == "running", "a resumed one answers"


def test_the_clock_shows_the_running_time_and_counts_on_while_the_scheduler_is_silent(
    answers: dict[str, Status],
) -> None:
    answers["a"] = structs.replace(STATUS, run_s=500.0, uptime_s=1.0)
    live = Live("a")
    assert live.snapshot().elapsed_s == 500.0
    Watch.age_s = 2.5
    assert live.snapshot().elapsed_s == 502.5


def test_the_clock_stops_with_the_run(answers: dict[str, Status], tmp_path: Path) -> None:
    live = Live("a", tmp_path)
    answers["a"] = structs.replace(STATUS, run_s=500.0, finished=True)
    assert live.snapshot().elapsed_s == 500.0
    answers["a"], Watch.age_s = structs.replace(STATUS, run_s=501.0, finished=True), 60.0
    (tmp_path / "summary.json").write_bytes(msgspec.json.encode(SUMMARY))
    assert live.snapshot().elapsed_s == 500.0
    answers["a"], Watch.age_s = structs.replace(STATUS, run_s=510.0), 0.0
    assert live.snapshot().elapsed_s == 510.0, "a resumed run continues"


def test_a_monitor_that_attaches_late_shows_the_progress_since_the_first_evaluation(answers: dict[str, Status]) -> None:
    metrics = {"step": 90, "lineage": 1, "reward/eval": 0.71}
    first = {"step": -1, "lineage": 0, "reward/eval": 0.39}
    answers["a"] = structs.replace(STATUS, metrics=metrics, first_metrics=first)
    history = History()
    for _ in range(2):
        history.see(Live("a").snapshot())
    assert board("run", Live("a").snapshot(), history).held_out == (0.39, 0.71)


def test_a_snapshot_does_not_wait_for_a_file_system_that_hangs(
    answers: dict[str, Status], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a pipe without a writer blocks like a read from an unresponsive network file system."""
    monkeypatch.setattr(hung_files, "PATIENCE_S", 0.2)
    os.mkfifo(tmp_path / "metrics.jsonl")
    answers["a"] = STATUS
    live = Live("a", tmp_path)
    assert [live.snapshot().lines for _ in range(3)] == [(), (), ()]
    os.close(os.open(tmp_path / "metrics.jsonl", os.O_WRONLY))  # the read fails, as it does when the server returns
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"loss":0.5}\n')
    deadline = time.monotonic() + 100
    while not (lines := live.snapshot().lines):
        assert time.monotonic() < deadline
    assert lines == ({"step": 1, "loss": 0.5},)


@pytest.mark.parametrize(
    ("status", "age_s", "phase"),
    [
        ({"version": -1}, 0.0, "starting"),
        ({}, 0.0, "running"),
        ({"finished": True, "steps": 23}, 0.0, "finished"),
        ({}, 9.0, "no answer"),
    ],
)
def test_the_phase_is_said_in_a_word(
    answers: dict[str, Status], status: dict[str, Any], age_s: float, phase: str
) -> None:
    answers["a"] = structs.replace(STATUS, **status)
    Watch.age_s = age_s
    assert Live("a").snapshot().phase == phase
