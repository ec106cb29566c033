"""The coordination benchmark computes the right bounds and keeps its guarantees at a small size; speeds are virtual."""

import numpy as np
import pytest
from click.testing import CliRunner

from bench import coordination_bounds as bounds
from bench.coordination import main
from bench.coordination_fleet import engines
from bench.coordination_rows import Bench
from bench.coordination_table import Line, Table
from bench.coordination_world import FILL, FULL, SMALL, Job, Runs, run, world


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(Runs(1), SMALL, "flat", "start")


def promised(table: Table) -> None:
    """Check that no line of a table breaks the bound or discards a group."""
    for line in table.lines:
        assert (line.values.get("violations", 0), line.values.get("discarded", 0)) == (0, 0), line.what


def of(table: Table, what: str) -> Line:
    (line,) = [line for line in table.lines if what in line.what]
    return line


# --- bounds ----------------------------------------------------------------------------------------------------


def test_the_workload_is_the_one_that_the_targets_were_measured_with() -> None:
    """E[max of 64] is 11,127 tokens at 12.4 ms each: at most 0.87 steps a minute; the share beyond two steps is
    0.199."""
    config = world(FULL, "flat", "start", eta=1)
    lengths = bounds.drawn(config, 64 * 100)
    longest = bounds.batches(lengths, 64, 1)
    assert longest.mean() == pytest.approx(11_127, rel=0.05)
    assert bounds.batch_bound(longest, bounds.token_s(config), 20.0, 1, early=True) == pytest.approx(0.87, rel=0.05)
    assert bounds.masked_floor(lengths, 0.0124, 40.0) == pytest.approx(0.199, rel=0.1)


def test_a_chain_of_equal_batches_is_as_fast_as_its_bound_and_an_uneven_one_is_not() -> None:
    even, uneven = np.full(60, 100.0), np.array([50.0, 150.0] * 30)
    for early, seconds in ((True, 100.0), (False, 110.0)):
        bound = bounds.batch_bound(even, 1.0, 10.0, 1, early=early)
        assert bound == pytest.approx(60 * 2 / seconds)
        assert bounds.batch_optimum(even, 1.0, 10.0, 1, early=early) == pytest.approx(bound, rel=0.04)
        assert bounds.batch_optimum(uneven, 1.0, 10.0, 2, early=early) < 0.95 * bounds.batch_bound(
            uneven, 1.0, 10.0, 2, early=early
        )
    assert bounds.batch_bound(even, 0.01, 10.0, 1, early=False) == 6.0, "the trainer's own limit"


def test_the_first_batches_all_begin_at_once_and_train_as_they_end() -> None:
    lengths = np.array([[9.0], [1.0], [2.0], [8.0], [5.0], [6.0]])
    assert bounds.batches(lengths, 2, 1).tolist() == [2.0, 9.0, 6.0]
    assert bounds.batches(lengths, 2, 0).tolist() == [9.0, 8.0, 6.0]


def test_blocks_are_ordered_longest_first_and_last_in_turn() -> None:
    lengths = np.array([[2.0], [3.0], [1.0], [6.0], [4.0], [5.0]])
    assert bounds.clustered(lengths, 3).ravel().tolist() == [3.0, 2.0, 1.0, 4.0, 5.0, 6.0]


def test_the_window_is_a_train_step_shorter_when_versions_are_out_after_it() -> None:
    assert bounds.window_s(20.0, 20.0, 1, early=True) == 40.0
    assert bounds.window_s(25.0, 20.0, 1, early=False) == 30.0


def test_what_outlasts_the_window_is_masked_and_more_where_nobody_knows_lengths() -> None:
    """Trajectories of 10 and 30 s, a window of 20 s, steps of 20 s: a long one that starts 10 s after a version ends
    with a batch, and 10 of its 30 s are too old. Beside a trajectory of 20 s, no start suits both."""
    assert bounds.masked_floor(np.array([10.0, 30.0]), 1.0, 20.0) == 0.25
    assert bounds.masked_floor_unknown(np.array([10.0, 30.0]), 1.0, 20.0, 20.0) == 0.25
    assert bounds.masked_floor(np.array([20.0, 30.0]), 1.0, 20.0) == 0.2
    assert bounds.masked_floor_unknown(np.array([20.0, 30.0]), 1.0, 20.0, 20.0) == pytest.approx(0.4)


def test_a_group_is_as_old_as_the_steps_that_begin_before_its_end() -> None:
    lengths = np.array([[10.0, 9.0], [20.0, 1.0], [21.0, 2.0]])
    assert bounds.freshest(lengths, 1.0, 20.0, early=False) == pytest.approx(4 / 3)
    assert bounds.freshest(lengths, 1.0, 20.0, early=True) == pytest.approx(1 / 3)


# --- guarantees ------------------------------------------------------------------------------------------------


def test_the_token_bound_trains_at_nearly_full_speed_and_masks_no_less_than_it_must(bench: Bench) -> None:
    table = bench.token()
    promised(table)
    assert len(table.lines) == 9
    for line in table.lines:
        assert line.values["share"] >= 0.95, line.what
        assert line.values["masked"] >= line.values["floor"], line.what


def test_filling_the_window_is_the_psrl_preset_and_as_fast_as_a_batch_a_version_can_be(bench: Bench) -> None:
    table = bench.trajectory()
    promised(table)
    for eta in (1, 2, 3):
        fill, ours = of(table, f"η {eta}, fill"), of(table, f"η {eta}, just in time")
        assert fill.values["ratio"] == pytest.approx(1.0, abs=1e-3)
        assert fill.values["of_optimum"] == pytest.approx(1.0, abs=0.02)
        assert ours.values["ratio"] > 1.0


def test_clusters_are_faster_the_more_is_known_and_no_length_is_preferred(bench: Bench) -> None:
    table = bench.clustered()
    promised(table)
    known, learned, nothing = table.lines
    assert known.values["ratio"] > learned.values["ratio"] > 1.1
    assert nothing.values["ratio"] > 0.85
    assert [round(line.values["bias"], 2) for line in table.lines] == [1.0, 1.0, 1.0]


def test_what_is_started_just_in_time_is_fresher_at_about_the_same_speed(bench: Bench) -> None:
    table = bench.staleness()
    promised(table)
    for line in table.lines:
        assert line.values["less"] > 0.0, line.what
        assert line.values["age"] >= line.values["least"], line.what
        assert line.values["speed"] > 0.95, line.what
    assert sum(line.values["less"] for line in table.lines) > 0.25 * len(table.lines)


def test_asynchronous_runs_are_worth_more_than_twice_the_synchronous_one(bench: Bench) -> None:
    table = bench.asynchronous()
    promised(table)
    assert min(line.values["ratio"] for line in table.lines[1:]) > 2.0


def test_four_times_the_engines_train_four_times_the_groups() -> None:
    table = engines(SMALL, "flat", "start")
    assert table.lines[-1].values["share"] >= 0.9


@pytest.mark.parametrize("publish", ["start", "end"])
def test_no_run_is_faster_than_its_bound(publish: str) -> None:
    early = publish == "start"
    config = world(SMALL, "flat", "start" if early else "end", *FILL, eta=1)
    longest = bounds.batches(bounds.drawn(config, SMALL.batch * SMALL.steps), SMALL.batch, 1)
    result = run(Job(config))
    best = bounds.batch_optimum(longest, bounds.token_s(config), SMALL.train_s, 1, early=early)
    assert best * 0.97 <= result.steps_per_min <= best * 1.001


# --- output ----------------------------------------------------------------------------------------------------


def test_a_table_says_what_is_met_and_puts_it_aside_where_the_targets_were_not_meant() -> None:
    lines = [
        Line(what="a", measured="1", met=False),
        Line(what="b", measured="2", met=False, possible=False),
        Line(what="c", measured="3", met=True),
        Line(what="d", measured="4"),
    ]
    assert last(Table(title="t", lines=lines)) == ["**no**", "cannot be", "yes", ""]
    assert last(Table(title="t", lines=lines, judged=False)) == ["(no)", "(cannot be)", "(yes)", ""]


def last(table: Table) -> list[str]:
    """Return the last cell of each line."""
    return [row.split(" | ")[-1].strip(" |") for row in table.markdown().splitlines()[4:]]


def test_the_small_version_prints_a_table_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = CliRunner().invoke(main, ["--small", "--rows", "ledger", "--publish", "start"])
    assert shown.exit_code == 0, shown.output
    assert f"| {SMALL.events:,} random events | identical admissions" in shown.output
    assert "| yes |" in shown.output


def test_a_row_that_is_none_is_refused() -> None:
    shown = CliRunner().invoke(main, ["--rows", "tokens"])
    assert shown.exit_code == 2
    assert "'tokens' is none of ledger, token," in shown.output
