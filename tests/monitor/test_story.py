"""The story of one group describes its fate in prose; stories of other groups describe single events."""

import json
from pathlib import Path
from typing import Any

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.monitor.events import describe
from staleflow.monitor.story import Chapter, events_about, headline, story
from tests.monitor.test_replay import written


def test_the_story_of_a_group_goes_from_its_lease_to_its_training(tmp_path: Path) -> None:
    events = events_about(written(tmp_path), 7)
    assert headline(events, 7) == "group 7: trained by step 0, 1 lease, 94.0 s"
    assert story(events, 7) == (
        Chapter(
            after_s=0.0,
            event="reserve",
            words="leased to rollout-0 at version 0 (lease 1), deadline step 1",
        ),
        Chapter(
            after_s=20.0,
            event="push",
            words="rollout-0 pushed 500 tokens of version 0; 9 B at shard 0",
            tone="good",
        ),
        Chapter(after_s=21.0, event="occupy", words="all stages finished: ready to train", tone="good"),
        Chapter(after_s=21.0, event="seal", words="sealed for step 0 in batch 1, 0 versions old", tone="good"),
        Chapter(after_s=22.0, event="deliver", words="batch 1 delivered to rank 0 of the trainer"),
        Chapter(after_s=94.0, event="consume", words="trained: step 0 is done, version 1 exists", tone="good"),
    )


def test_what_a_rollback_took_back_is_not_called_trained(tmp_path: Path) -> None:
    path = written(tmp_path)
    common = json.loads(path.read_text().splitlines()[0]) | {"t": int(1101e9), "m": int(101e9)}
    back = common | {"ev": "rollback", "lineage": 1, "from_lineage": 0, "to_version": 1, "trainer_term": 2}
    drop = common | {"ev": "drop", "group": 7, "lease": 1, "tokens": 500, "why": "rollback"}

    def after(*lines: dict[str, Any]) -> list[dict[str, Any]]:
        text = written(tmp_path).read_text() + "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        path.write_text(text)
        return events_about(path, 7)

    assert after(back) == after()
    assert "trained by step 0" in headline(after(back), 7), "version 1 is what step 0 made"
    events = after(back | {"to_version": 0})
    assert headline(events, 7).startswith("group 7: ready to train, ")
    assert story(events, 7)[-1].words == "rolled back to version 0: its batch is void"
    assert headline(after(back | {"to_version": 0}, drop), 7).startswith("group 7: dropped: rollback, ")
    assert headline(after(drop), 7).startswith("group 7: dropped: rollback, ")


def test_a_group_that_is_part_of_another_number_is_not_told(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert events_about(path, 1) == []
    assert headline([], 1) == "group 1: the trace does not contain it"


def event(ev: str, at_s: float, **fields: Any) -> dict[str, Any]:
    return {"ev": ev, "m": int(at_s * 1e9), "t": int(at_s * 1e9), "group": 7, "lease": 3, **fields}


def test_what_was_lost_moved_or_refused_is_said() -> None:
    segments = [{"lineage": 0, "version": 1, "tokens": 200}, {"lineage": 0, "version": 2, "tokens": 56}]
    events = [
        event("release", 1, why="expired", tokens=0),
        event("release", 1, why="filtered", tokens=12),
        event("push", 2, worker="a.b", bytes=2000, shard=1, truncated=True, segments=segments),
        event("promote", 3, demoted=9),
        event("drop", 4, why="quarantine", tokens=256),
        event("reject", 5, op="push", worker="a.b", count=2, code="stale_lease"),
    ]
    assert [chapter.words for chapter in story(events, 7)] == [
        "released: expired (lease 3)",
        "released: filtered (lease 3), 12 tokens discarded",
        "a pushed 256 tokens: 200 of version 1, 56 of version 2, cut short; 2.0 KB at shard 1",
        "promoted from spare to counted group instead of group 9",
        "dropped: quarantine, 256 tokens discarded",
        "push of a rejected: stale_lease, 2 times",
    ]
    assert headline(events[:2], 7) == "group 7: released: filtered, 0 leases, 0.00 s"
    assert headline(events[2:3], 7) == "group 7: in its stages, 0 leases, 0.00 s"


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it cannot be read"):
        events_about(tmp_path / "none", 7)
    (tmp_path / "torn").write_text('{"group":7,"ev"\n')
    with pytest.raises(ConfigError, match="not JSON"):
        events_about(tmp_path / "torn", 7)


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = events_about(path, 7)
    with path.open("a") as file:
        file.write('{"group":7,"ev"')
    assert events_about(path, 7) == before


@pytest.mark.parametrize(
    ("line", "words", "tone"),
    [
        ({"ev": "detach", "worker": "rollout-1.ab", "role": "rollout", "why": "silent"}, "rollout-1 is silent", "warn"),
        (
            {"ev": "detach", "worker": "rollout-1.ab", "role": "rollout", "why": "done"},
            "rollout-1 left: done",
            "warn",
        ),
        ({"ev": "rollback", "to_version": 3, "lineage": 1}, "rolled back to version 3: lineage 1 starts", "bad"),
        (
            {"ev": "overload", "on": True, "resource": "map", "used": 0.91},
            "the map is full (91 % of the map used): new work waits",
            "bad",
        ),
        ({"ev": "pull", "worker": "a.b", "version": 3, "ok": False}, "a could not load version 3", "bad"),
        ({"ev": "tomorrow"}, "tomorrow", ""),
    ],
)
def test_an_event_reads_as_a_sentence(line: dict[str, Any], words: str, tone: str) -> None:
    assert describe(line) == (words, tone)
