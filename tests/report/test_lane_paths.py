"""Lanes become silhouettes."""

from staleflow.monitor.lanes import Lane, Span
from staleflow.report.charts import Tick, time_ticks
from staleflow.report.lane_paths import MAX_LANES, lane_rows

ENGINES = [Lane("engine", "rollout-0", [Span(0, 5), Span(0, 5)]), Lane("engine", "rollout-1", [Span(5, 10)])]


def test_the_height_of_a_lane_is_what_it_had_at_once() -> None:
    first, second = lane_rows(ENGINES, (0, 10)).rows
    assert (first.most, first.busy, first.path.d) == (2, "50 %", "M0 1000V0H500V1000H1000V1000Z")
    assert (second.most, second.busy, second.path.d) == (1, "50 %", "M0 1000V1000H500V500H1000V1000Z")


def test_a_window_shows_what_is_inside_it() -> None:
    rows = lane_rows(ENGINES, (4, 6)).rows
    assert [row.busy for row in rows] == ["50 %", "50 %"]
    assert rows[0].path.d == "M0 1000V0H500V1000H1000V1000Z"


def test_of_many_engines_some_are_left_out_and_never_the_trainer() -> None:
    many = [Lane("engine", f"rollout-{number}", [Span(0, 1)]) for number in range(500)]
    shown = lane_rows([*many, Lane("trainer", "trainer", [Span(0, 1)])], (0, 1))
    assert (len(shown.rows), shown.left_out, shown.rows[-1].worker) == (MAX_LANES, 501 - MAX_LANES, "trainer")


def test_moments_are_those_of_a_clock() -> None:
    assert time_ticks((0, 20)) == [
        Tick(0, "0:00"),
        Tick(25, "0:05"),
        Tick(50, "0:10"),
        Tick(75, "0:15"),
        Tick(100, "0:20"),
    ]
    assert [tick.text for tick in time_ticks((3500, 7300))] == [
        "1:00:00",
        "1:10:00",
        "1:20:00",
        "1:30:00",
        "1:40:00",
        "1:50:00",
        "2:00:00",
    ]


def test_who_looks_closely_sees_more_moments_and_none_twice() -> None:
    coarse, close, closer = lane_rows(ENGINES, (0, 80)).ticks
    assert [tick.text for tick in coarse] == ["0:00", "0:15", "0:30", "0:45", "1:00", "1:15"]
    places = [tick.at for tick in (*coarse, *close, *closer)]
    assert len(places) == len(set(places))
    assert len(coarse) < len(close) < len(closer) < 7 * 64
