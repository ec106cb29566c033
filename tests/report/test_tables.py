"""A trace becomes a table."""

from pathlib import Path

import pytest

import staleflow
from staleflow.report.tables import columns
from tests.report.traces import PLAIN, lines, save

NUMBERED = [event | {"seq": number} for number, event in enumerate(PLAIN, start=1)]


def test_every_column_is_as_long_as_the_table_and_has_gaps_where_an_event_has_no_field() -> None:
    held = columns(lines(NUMBERED))
    assert {len(column) for column in held.values()} == {len(PLAIN)}
    assert held["name"][1] == "rollout-0"
    assert held["bytes"][:5] == [None, None, None, 2**20, None]
    assert held["seconds"][-1] == 12
    assert {"t", "m", "h", "schema", "run"}.isdisjoint(held)


def test_only_the_kinds_that_are_asked_for_are_in_it(tmp_path: Path) -> None:
    trace = staleflow.Trace.open(save(tmp_path, NUMBERED))
    frame = trace.to_frame("push", "publish")
    assert list(frame["ev"]) == ["publish", "push", "publish", "push", "publish"]
    assert str(frame["time"].iloc[0]) == "1970-01-01 00:16:41+00:00"
    assert len(trace.to_frame("rollback")) == 0
    table = trace.to_arrow("seal")
    members = table["members"].to_pylist()
    assert [[(one["group"], one["version"]) for one in batch] for batch in members] == [[(1, 0)], [(2, 0)]]
    assert trace.to_arrow("rollback").num_rows == 0


def test_a_trace_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(staleflow.ConfigError, match=r"trace is .*trace\.jsonl.*no such file"):
        staleflow.Trace.open(tmp_path)


def test_a_group_has_its_story(tmp_path: Path) -> None:
    trace = staleflow.Trace.open(save(tmp_path, NUMBERED).parent)
    assert [event["ev"] for event in trace.story(2)] == ["reserve", "push", "occupy", "seal", "deliver", "consume"]


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    assert set(dir(staleflow)) == {
        *("BadVersion", "ConfigError", "Fenced", "LeaseError", "LoadError", "NoBatch", "Refused", "StageError"),
        *("Result", "Run", "Trace", "Unavailable", "connect", "external", "fetch_weights", "load", "run"),
        *("PromptClient", "RolloutClient", "StageClient", "TrainerClient"),
        *("AsyncPromptClient", "AsyncRolloutClient", "AsyncStageClient", "AsyncTrainerClient"),
        *("Outcome", "PromptError", "RowResult", "__version__"),
        *("InstanceStats", "Lease", "ModelLimits", "PulledVersion", "Sample", "Sampling", "StageGroup"),
    }
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        staleflow.nothing  # noqa: B018
