"""What the screen looks like, in characters."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from staleflow.monitor.ending import print_summary
from staleflow.monitor.model import History, board
from staleflow.monitor.plain import PlainView
from staleflow.monitor.screen import LiveView, render
from staleflow.monitor.words import clock, curve, meter, number
from staleflow.supervisor.summary import Summary
from staleflow.supervisor.view import ProcessState, Snapshot
from tests.monitor.test_model import STATUS

ROLES = ("scheduler", "trajectories-0", "parameters", "rollout-0", "rollout-1", "reward-0", "trainer")
SUMMARY = Summary(
    name="quickstart",
    run_dir="/runs/quickstart-1",
    outcome="finished",
    steps=100,
    steps_wanted=100,
    reward_start=0.33,
    reward_end=0.91,
    reward_of="held-out prompts",
    off_policy_mean=1.5,
    off_policy_max=2,
    max_staleness=2,
    bound="trajectory",
    violations=0,
    tokens_trained=12345,
    tokens_generated=23456,
    tokens_per_s=1234.5,
    wall_s=245.0,
    restarts={"rollout-0": 1},
    groups_lost={"expired": 3},
)


def snapshot(**status: Any) -> Snapshot:
    processes = tuple(ProcessState(name=name, kind="worker", state="running") for name in ROLES)
    return Snapshot(phase="training", elapsed_s=83.0, processes=processes, status=STATUS | status)


def drawn(shot: Snapshot, width: int = 80) -> list[str]:
    history = History()
    history.see(shot)
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(board("quickstart", shot, history), "runs/quickstart-20261121-044712", width))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def test_a_run_fits_80_by_24() -> None:
    window = [{"deadline": step, "leased": 3, "pushed": 2, "occupied": 3} for step in range(24, 27)]
    lines = drawn(
        snapshot(window=window, why="step 23 is pinned by group 117 and 3 more: version 21, at rollout-0.6a72")
    )
    assert len(lines) <= 23
    assert max(len(line) for line in lines) <= 80
    text = "\n".join(lines)
    for words in (
        "23 of 100",
        "0.61",
        "max 2   bound 2   0 violations",
        "by step 24",
        "trains step 23",
        "pinned by group",
    ):
        assert words in text


def test_a_hundred_engines_still_fit() -> None:
    processes = tuple(ProcessState(name=f"rollout-{n}", kind="worker", state="running") for n in range(100))
    lines = drawn(Snapshot(phase="training", elapsed_s=1.0, processes=processes, status=STATUS | {"workers": []}))
    assert len(lines) <= 23
    assert any("and 91 more" in line for line in lines)


def test_violations_are_never_hidden() -> None:
    assert any("3 violations" in line for line in drawn(snapshot(violations=3)))


def test_an_insecure_run_says_so_everywhere() -> None:
    assert any("INSECURE: bound beyond this machine" in line for line in drawn(snapshot(security="insecure")))
    assert not any("INSECURE" in line for line in drawn(snapshot(security="keys")) + drawn(snapshot()))
    out = io.StringIO()
    PlainView(out, "run").show(snapshot(security="insecure"))
    assert "INSECURE: bound beyond this machine" in out.getvalue()


def test_the_live_view_leaves_the_summary_and_what_was_said(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False)
    view = LiveView("quickstart", tmp_path, console)
    view.start()
    view.show(snapshot())
    view.say("rollout-0 died with SIGKILL; it is started again")
    view.stop()
    view.summary(SUMMARY)
    file = console.file
    assert isinstance(file, io.StringIO)
    assert "rollout-0 died with SIGKILL" in file.getvalue()
    assert "0.33 → 0.91" in file.getvalue()


def test_the_plain_view_says_a_line_at_a_new_phase_and_then_now_and_again() -> None:
    out = io.StringIO()
    view = PlainView(out, "quickstart", every_s=1000.0)
    view.start()
    for _ in range(3):
        view.show(snapshot())
    view.show(Snapshot(phase="draining", elapsed_s=90.0, status=STATUS))
    view.stop()
    lines = out.getvalue().splitlines()
    assert lines[0] == (
        "   1:23  training  step 23/100  reward 0.61  staleness 1.2/2 of 2  0 tokens/s  (the trainer works on step 23)"
    )
    assert len(lines) == 2


def test_the_plain_view_can_give_the_summary_as_json() -> None:
    out, summary = io.StringIO(), io.StringIO()
    PlainView(out, "quickstart", summary_to=summary).summary(SUMMARY)
    assert out.getvalue() == ""
    assert msgspec.json.decode(summary.getvalue(), type=Summary) == SUMMARY


def test_the_summary_names_everything_that_the_run_promises() -> None:
    out = io.StringIO()
    print_summary(SUMMARY, Console(file=out, width=88))
    text = out.getvalue()
    for words in (
        "100 of 100",
        "0.33 → 0.91",
        "held-out prompts",
        "mean 1.50, max 2",
        "2 (trajectory)",
        "1,234",
        "4:05",
        "rollout-0 1",
        "expired 3",
        "/runs/quickstart-1",
    ):
        assert words in text


def test_a_failed_run_says_why() -> None:
    out = io.StringIO()
    failed = msgspec.structs.replace(SUMMARY, outcome="failed", error="step 3: NaN loss", violations=None)
    print_summary(failed, Console(file=out, width=88))
    assert "failed: step 3: NaN loss" in out.getvalue()
    assert "no trace" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0:00"), (59.9, "0:59"), (83, "1:23"), (3600, "1:00:00"), (-1, "0:00")]
)
def test_time_reads_as_a_clock(seconds: float, words: str) -> None:
    assert clock(seconds) == words


def test_numbers_that_are_not_known_are_a_dash() -> None:
    assert (number(None), number(0.0), number(1234.567)) == ("-", "0.00", "1,234.57")


def test_a_curve_goes_from_its_smallest_to_its_largest_value() -> None:
    assert curve([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert curve([0.5, 0.5], 10) == "▁▁"
    assert curve([1.0], 10) == ""
    assert curve([9.0, 0.0, 1.0], 2) == "▁█"


def test_a_meter_never_overflows() -> None:
    assert meter([4, 2, 2], 8, 24) == [12, 6, 6]
    assert meter([8, 8, 8], 8, 24) == [24, 0, 0]
    assert meter([0, 0, 0], 0, 24) == [0, 0, 0]
