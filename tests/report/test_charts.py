"""Numbers become paths and ticks."""

from collections.abc import Sequence

import pytest

from staleflow.report.charts import Chart, Series, Tick, lines, number, stack


def one(values: Sequence[float | None]) -> Chart:
    return lines("reward", range(len(values)), [Series(name="r", colour="blue", values=values)])


def test_a_curve_goes_from_corner_to_corner_between_round_ticks() -> None:
    chart = one([0.0, 1.0, 4.0])
    assert [path.d for path in chart.paths] == ["M0.0 1000.0L500.0 750.0L1000.0 0.0"]
    assert chart.y_ticks == [Tick(0, "0"), Tick(50, "2"), Tick(100, "4")]
    assert chart.latest == "4"


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.9992, 1.0, ["0.999", "0.9995", "1"]),
        (12_345_000, 12_346_500, ["12.345M", "12.3455M", "12.346M", "12.3465M"]),
        (1000.2, 1000.9, ["1000", "1000.2", "1000.5", "1000.8", "1001"]),
    ],
)
def test_ticks_of_what_hardly_moves_can_be_told_apart(low: float, high: float, words: list[str]) -> None:
    assert [tick.text for tick in one([low, high]).y_ticks] == words


def test_places_in_any_order_are_drawn_inside_the_box() -> None:
    chart = lines("loaded", [1, 20, 11, 13], [Series(name="s", colour="blue", values=[1.0, 2.0, 3.0, 4.0])])
    across = [float(point.split()[0]) for point in chart.paths[0].d[1:].split("L")]
    assert (min(across), max(across), chart.low, chart.high) == (0, 1000, 1, 20)


def test_what_was_not_measured_or_is_no_number_is_left_out() -> None:
    chart = one([0.0, None, float("nan"), 3.0])
    assert chart.paths[0].d == "M0.0 1000.0L1000.0 0.0"
    assert chart.hover["y"] == [{"name": "r", "colour": "blue", "v": [0.0, None, None, 3.0]}]


@pytest.mark.parametrize("value", [0.0, 5.0, -2.0, 1e-9, 1e12])
def test_a_constant_stands_in_the_middle(value: float) -> None:
    chart = one([value, value])
    heights = [float(point.split()[1]) for point in chart.paths[0].d[1:].split("L")]
    assert heights[0] == heights[1]
    assert 0 < heights[0] < 1000


def test_a_single_point_can_be_seen_and_nothing_is_no_error() -> None:
    assert one([1.0]).paths[0].d.count("L") == 1
    assert one([]).paths == []


def test_many_points_are_averaged_and_a_noisy_curve_is_smoothed_above_itself() -> None:
    chart = one([float(at % 2) for at in range(4_000)])
    assert [path.kind for path in chart.paths] == ["faint", "line"]
    assert all(path.d.count("L") < 500 for path in chart.paths)
    assert chart.hover["y"] == [{"name": "r", "colour": "blue", "v": [0.5] * 400}]


def test_the_bound_is_a_line_at_its_height_with_room_above() -> None:
    chart = lines(
        "age", [0, 1], [Series(name="a", colour="blue", values=[0.0, 1.0])], level=(2, "bound 2"), from_zero=True
    )
    assert chart.level is not None
    assert chart.level[0] == pytest.approx(100 * 2 / (2 + 2 / 6))
    assert chart.level[1] == "bound 2"


def test_areas_lie_on_each_other() -> None:
    series = [Series(name="a", colour="blue", values=[1.0, 1.0]), Series(name="b", colour="red", values=[3.0, None])]
    lower, upper = stack("s", [0, 1], series).paths
    assert (
        lower.d == "M0.0 750.0L500.0 750.0L500.0 750.0L1000.0 750.0L1000.0 1000.0L500.0 1000.0L500.0 1000.0L0.0 1000.0Z"
    )
    assert upper.d == "M0.0 0.0L500.0 0.0L500.0 750.0L1000.0 750.0L1000.0 750.0L500.0 750.0L500.0 750.0L0.0 750.0Z"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.05, "0.05"),
        (1234, "1234"),
        (12_345, "12.3k"),
        (3e6, "3M"),
        (1.5e-5, "1.5e-5"),
        (-0.25, "-0.25"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_a_maximum_is_never_averaged_with_its_neighbours() -> None:
    spike = [0.0] * 50 + [9.0] + [0.0] * 50
    chart = lines("age", range(101), [Series(name="oldest", colour="orange", values=spike, exact=True)])
    assert [path.kind for path in chart.paths] == ["thin"]
    assert " 100.0L" in chart.paths[0].d  # 9 of 10
    long = lines("age", range(4_040), [Series(name="oldest", colour="orange", values=spike * 40, exact=True)])
    assert long.paths[0].d.count(" 100.0") == 40
