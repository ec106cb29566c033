"""The times at which workers had groups are lines in a bounded file, and a failure to write never ends the process."""

import json
from pathlib import Path

import pytest

from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.servers.trajectories import stage_times
from staleflow.servers.trajectories.records import Key
from staleflow.servers.trajectories.stage_queue import Ticket
from staleflow.servers.trajectories.stage_times import StageTimes, path_of
from tests.servers.trajectories.scarce import no_descriptor


def line(times: StageTimes, number: int) -> None:
    """Write the line for one group of worker ``w``."""
    times.started("reward", [Ticket(number, Key(GroupId(number), LeaseId(1)), "w", 0.0)], float(number))
    times.finished("reward", "w", [number], number + 0.5)


def began(path: Path) -> list[float]:
    return [json.loads(line)["begin_s"] for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a file that is rotated after every second line."""
    monkeypatch.setattr(stage_times, "MAX_BYTES", 100)
    return path_of(tmp_path, 0)


def test_a_full_file_is_rotated_and_one_old_file_is_kept(path: Path) -> None:
    times = StageTimes(path)
    for number in range(1, 6):
        line(times, number)
    assert began(path.with_suffix(".old.jsonl")) == [3.0, 4.0]
    assert began(path) == [5.0]


def test_without_a_descriptor_only_the_next_lines_are_lost(path: Path) -> None:
    times = StageTimes(path)
    with no_descriptor():
        line(times, 1)
    for number in range(2, 4):
        line(times, number)
    with no_descriptor():
        for number in range(4, 8):
            line(times, number)
    line(times, 8)
    assert began(path.with_suffix(".old.jsonl")) == [2.0, 3.0]
    assert began(path) == [8.0]
