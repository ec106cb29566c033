"""Without a terminal, ``top`` prints lines, one picture or an object; stories are read in the background."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from staleflow.monitor.keyboard import Keyboard
from staleflow.monitor.look import Look
from staleflow.monitor.sources import Live, Replay
from staleflow.monitor.top import SILENCE_TIMEOUT_S, Stories, Top, lines, once
from staleflow.net.errors import Unavailable
from tests.monitor.test_replay import written
from tests.monitor.test_sources import Watch
from tests.monitor.world import STATUS


def test_a_replay_is_a_line_every_five_seconds_of_the_run(tmp_path: Path) -> None:
    out = io.StringIO()
    waits = list(lines(Replay(written(tmp_path), steps=3), out, as_json=False, speed=10.0))
    said = out.getvalue().splitlines()
    assert set(waits) == {0.5}
    assert len(said) == len(waits) + 1 == 21
    assert "   0:10  replay  0/3 steps  " in said[2]
    assert "replay, the end  1/3 steps" in said[-1]


def test_an_object_a_second_has_everything_that_a_screen_shows(tmp_path: Path) -> None:
    out = io.StringIO()
    waits = list(lines(Replay(written(tmp_path)), out, as_json=True, speed=1.0))
    boards = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (waits[0], len(boards)) == (1.0, 101)
    assert boards[30]["trainer"] == "step 0 trains"
    assert [row["name"] for row in boards[-1]["instances"]] == ["rollout-0"]
    assert boards[-1]["ages"][0] == {"age": 0, "in_flight": 0, "in_queue": 0, "consumed": 1}


def test_one_picture_of_a_replay_is_its_end(tmp_path: Path) -> None:
    out = io.StringIO()
    once(Replay(written(tmp_path)), Console(file=out, width=150), as_json=False)
    assert "replay, the end 1:40" in out.getvalue()
    assert len(out.getvalue().splitlines()) == 50


class Slow(Replay):
    """Replaying the trace takes two minutes."""

    now_s = 0.0

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self.now_s += 120.0 if seconds < 0 else 0.0


class Typed(Keyboard):
    """Press one key every second; return the position of the replay afterwards."""

    def __init__(self, replay: Slow, *keys: str) -> None:
        super().__init__(io.StringIO())
        self._replay, self._keys, self.places = replay, list(keys), list[float]()

    def read(self, timeout_s: float) -> list[str]:
        self.places.append(self._replay.at_s)
        self._replay.now_s += 1.0
        return [self._keys.pop(0)]


def test_the_time_that_a_way_back_takes_is_none_of_the_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Slow(written(tmp_path))
    monkeypatch.setattr(
        "staleflow.monitor.top.time", SimpleNamespace(monotonic=lambda: replay.now_s, process_time=lambda: 0.0)
    )
    keyboard = Typed(replay, "x", "x", "left", "x", "right", "x", "q")
    Top(replay, Console(file=io.StringIO(), width=80, height=24), Look(speed=20.0)).run(keyboard)
    assert keyboard.places == [0.0, 20.0, 40.0, 30.0, 50.0, 60.0, 80.0]


def test_lines_end_when_the_scheduler_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staleflow.monitor.sources.StatusWatch", Watch)
    Watch.answers, Watch.age_s = {}, SILENCE_TIMEOUT_S + 1
    Watch.answers["a"] = STATUS
    out = io.StringIO()
    with pytest.raises(Unavailable, match="no answer from a for 31"):
        list(lines(Live("a"), out, as_json=False, speed=None))
    assert "the scheduler has not answered for 31 s" in out.getvalue()


def test_a_story_is_read_beside_the_screen_once(tmp_path: Path) -> None:
    trace = written(tmp_path)
    stories = Stories(lambda: trace)
    told = stories.of(7)
    while told is None:
        told = stories.of(7)
    assert told.headline.startswith("group 7: trained by step 0")
    assert stories.of(7) is told
    assert stories.of(None) is None
    stories.close()


def test_a_story_that_is_out_of_reach_says_where_it_is() -> None:
    stories = Stories(lambda: None)
    told = stories.of(7)
    while told is None:
        told = stories.of(7)
    assert "staleflow trace show RUN_DIR" in told.headline
    stories.close()
