"""The screen shows the expected characters: two complete pictures, and the parts that must never be missing.

After an intended change, run ``STALEFLOW_DRAW=1 pytest tests/monitor/test_screen.py`` and review the files it writes.
"""

import dataclasses
import io
import itertools
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from rich.console import Console

from staleflow.monitor.ending import print_summary
from staleflow.monitor.history import History
from staleflow.monitor.live import LiveView
from staleflow.monitor.look import TABS, Look
from staleflow.monitor.model import Board, board
from staleflow.monitor.plain import PlainView
from staleflow.monitor.screen import OpenStory, dashboard, keys
from staleflow.monitor.story import Chapter
from staleflow.monitor.words import amount, bar, clock, curve, meter, number, short, span
from staleflow.protocols.wire.messages.status import Ages, Recommendation, WindowStatus
from staleflow.supervisor.summary import Summary
from staleflow.supervisor.view import Snapshot
from tests.monitor.world import ROLES, STATUS, process, shown

SCREENS = Path(__file__).parent / "screens"
SIZES = ((80, 24), (200, 60))
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
    return dataclasses.replace(shown(tuple(map(process, ROLES)), **status), elapsed_s=83.0)


def seen(shot: Snapshot) -> Board:
    """The screen after a minute of polls."""
    history = History()
    for at_s, rate in ((20.0, 400.0), (50.0, 900.0), (80.0, 1234.0)):
        engines = (structs.replace(STATUS.instances[0], tokens_per_s=rate), *STATUS.instances[1:])
        lines: list[dict[str, Any]] = [{"step": at_s, "reward/mean": rate / 2000, "loss": 1 / rate}]
        waits = "" if at_s < 50 else "older groups"
        history.see(dataclasses.replace(shown(at_s=at_s, instances=engines, trainer_waits=waits), lines=tuple(lines)))
    history.see(shot)
    return board("quickstart", shot, history)


def drawn(it: Board, look: Look | None = None, width: int = 80, height: int = 24, **more: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False)
    console.print(dashboard(it, look or Look(), width, height, **more))
    file = console.file
    assert isinstance(file, io.StringIO)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_whole_screen(width: int, height: int) -> None:
    lines = drawn(seen(snapshot()), Look(), width, height, footer=keys(Look()))
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    path = SCREENS / f"{width}x{height}.txt"
    if os.environ.get("STALEFLOW_DRAW"):
        path.write_text("\n".join(lines) + "\n")
    assert lines == path.read_text().splitlines()


def test_the_documentation_shows_this_screen() -> None:
    page = (SCREENS.parents[2] / "docs" / "tutorials" / "monitor.md").read_text()
    assert (SCREENS / "80x24.txt").read_text() in page


def test_a_recommended_change_of_the_engines_is_below_the_reason() -> None:
    advice = Recommendation(action="add", count=2, sentence="add 2 engines: the trainer waits; 6 -> 9 steps/min")
    lines = drawn(seen(snapshot(recommendation=advice)), Look(), 100, 30)
    assert "advice  add 2 engines: the trainer waits; 6 -> 9 steps/min" in lines[2:4]
    kept = Recommendation(action="keep", sentence="keep all engines: balanced")
    assert not any(line.startswith("advice") for line in drawn(seen(snapshot(recommendation=kept)), Look(), 100, 30))


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 16), (100, 50), (149, 34), (150, 34), (300, 90)])
def test_every_list_fits_every_terminal(tab: str, width: int, height: int) -> None:
    lines = drawn(seen(snapshot()), Look(tab=tab), width, height, footer=keys(Look()))
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert any(line.startswith("why  the trainer works on step 23; step 24") for line in lines)
    assert " q leave" in lines[-1]


@pytest.mark.parametrize(
    ("tab", "words"),
    [
        ("engines", "rollout-1    22→23     4/32        0  25 %       310"),
        ("groups", "117         22  31.0 s  about 20.0 s  rollout-1"),
        ("stages", "judge         1        1  1 of 8        4"),
        ("versions", "22       2.2 MB        1  rollout-1"),
        ("events", "12 s  group 98 released: expired"),
        ("processes", "rollout-0       version 23, 32 decoding, 5 queued, 1,234 tokens/s"),
    ],
)
def test_every_list_says_what_it_is_for(tab: str, words: str) -> None:
    assert words in "\n".join(drawn(seen(snapshot()), Look(tab=tab)))


def test_the_engines_are_sorted_and_filtered() -> None:
    it = seen(snapshot())

    def names(look: Look) -> list[str]:
        text = "\n".join(drawn(it, look))
        return sorted(
            (f"rollout-{n}" for n in range(3) if f"rollout-{n} " in text.split("6:processes")[1]), key=text.rindex
        )

    assert names(Look()) == ["rollout-0", "rollout-1", "rollout-2"]
    assert names(Look(sort="tokens/s", reverse=True)) == ["rollout-0", "rollout-1", "rollout-2"]
    assert names(Look(sort="tokens/s")) == ["rollout-2", "rollout-1", "rollout-0"]
    assert names(Look(needle="pull")) == ["rollout-1"]
    assert "no row contains 'nobody': Esc shows all" in "\n".join(drawn(it, Look(needle="nobody")))


def test_an_engine_may_have_any_name() -> None:
    engines = [structs.replace(STATUS.instances[0], worker=name, name=name) for name in ("gpu-10", "gpu-²", "gpu-2")]
    text = "\n".join(drawn(seen(snapshot(instances=engines))))
    assert text.index("gpu-2 ") < text.index("gpu-10 ") < text.index("gpu-² ")


def test_the_chosen_row_of_a_thousand_engines_is_on_the_screen() -> None:
    engines = [structs.replace(STATUS.instances[0], worker=f"rollout-{n}.aa", name=f"rollout-{n}") for n in range(1024)]
    it = seen(snapshot(instances=engines))
    text = "\n".join(drawn(it, Look(row=700)))
    assert "rollout-700 " in text
    assert "696-701 of 1024" in text
    assert "rollout-1023 " in "\n".join(drawn(it, Look(row=10**6)))


def test_a_story_takes_the_place_of_the_panels() -> None:
    chapters = tuple(Chapter(after_s=float(n), event="reject", words=f"line {n}") for n in range(40))
    open_story = OpenStory(headline="group 117: sealed, 1 lease, 3.00 s", chapters=chapters)
    lines = drawn(seen(snapshot()), Look(story=117), open_story=open_story)
    assert any("group 117: sealed" in line for line in lines)
    assert any("+1.00 s  reject  line 1" in line for line in lines)
    assert not any("line 39" in line for line in lines)
    assert any("line 39" in line for line in drawn(seen(snapshot()), Look(story=117, row=99), open_story=open_story))
    assert any("reading the trace" in line for line in drawn(seen(snapshot()), Look(story=117)))


def test_the_help_names_every_key() -> None:
    text = "\n".join(drawn(seen(snapshot()), Look(help=True)))
    for words in ("g NUMBER", "/ TEXT", "Space", "+ -, ← →", "q, Ctrl-C", "! pins"):
        assert words in text


def test_the_last_row_says_what_is_typed() -> None:
    assert keys(Look(typing="filter", typed="roll")).plain == " filter: roll▏   Enter, Esc"
    assert keys(Look()).plain.startswith(" q leave  ? keys  1-6 lists ")
    assert keys(Look(speed=2.5)).plain.startswith(" 2.5x  q leave  ? keys  space pause  +,- speed ")


def test_colours_are_left_out_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, highlight=False)
    console.print(dashboard(seen(snapshot()), Look(), 80, 24))
    file = console.file
    assert isinstance(file, io.StringIO)
    assert "\x1b[3" not in file.getvalue().replace("\x1b[3m", "")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_before_the_first_answer_nothing_is_claimed(width: int, height: int) -> None:
    empty = Snapshot(phase="building the model", elapsed_s=1.0, processes=(process("model"),), detail="step 3")
    lines = drawn(board("run", empty, History()), Look(tab="processes"), width, height)
    text = "\n".join(lines)
    assert "building the model 0:01" in text
    assert "model    step 3" in text
    assert "staleness" not in text
    assert "window" not in text
    assert lines[1] == "why  building the model: step 3; no other process has started yet"
    silent = board("run", Snapshot(phase="no answer yet", elapsed_s=1.0), History())
    assert drawn(silent)[1] == "why  no answer yet: no answer from the scheduler yet"


LONG_NAME = "quickstart-20261122-045332"


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (120, f"staleflow {LONG_NAME}  ● training 1:23  ━━━━━━━━━·"),
        (80, "staleflow quickstart-2…61122-045332  ● training 1:23  23 of 100 steps  1:30 left"),
        (72, "staleflow quicksta…2-045332  ● training 1:23  23 of 100 steps  1:30 left"),
        (60, "quickst…-045332  ● training 1:23  23 of 100 steps  1:30 left"),
        (40, "qu…332  ● training 1:23  23 of 100 steps"),
    ],
)
def test_the_step_and_the_state_stay_in_the_first_line_however_narrow(width: int, line: str) -> None:
    it = dataclasses.replace(seen(snapshot()), name=LONG_NAME, left_s=90.0)
    first = drawn(it, width=width)[0]
    assert len(first) <= width
    assert first.startswith(line) if width > 100 else first == line
    assert "● training 1:23" in first
    assert "23 of 100 steps" in first


def test_how_far_it_is_can_be_read_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), width=120, height=24, force_terminal=True, highlight=False)
    console.print(dashboard(seen(snapshot()), Look(), 120, 24))
    file = console.file
    assert isinstance(file, io.StringIO)
    assert "━━━━━━━━━·······" in "".join(re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()).splitlines()[0])


def test_the_reason_has_as_many_rows_as_it_needs_and_an_ellipsis_when_that_is_too_many() -> None:
    reason = "each of the last 40 groups failed, the newest: reward: " + " ".join(f"word{n}" for n in range(40))
    lines = drawn(seen(snapshot(why=reason)))
    end = next(number for number, line in enumerate(lines) if line.startswith("╭"))
    assert " ".join(lines[1:end]) == f"why  {reason}"
    lines = drawn(seen(snapshot(why=f"{reason} {reason}")), height=16)
    end = next(number for number, line in enumerate(lines) if line.startswith("╭"))
    assert (end, len(lines)) == (5, 16)
    assert lines[4].endswith(" …")
    assert "…" not in "".join(lines[:4])


def test_a_narrow_list_leaves_columns_out_and_no_digit() -> None:
    engines = [structs.replace(STATUS.instances[0], worker=f"rollout-{n}.aa", name=f"rollout-{n}") for n in (10, 11)]
    lines = drawn(seen(snapshot(instances=engines)), Look(), 60, 24)
    assert [line[2:13] for line in lines if line.startswith("│ rollout-1")] == ["rollout-10 ", "rollout-11 "]
    assert any("rollout-10       23    32/32  75 %      1.2k  assign " in line for line in lines)


def test_no_box_is_empty_for_want_of_rows() -> None:
    reason = " ".join(f"word{n}" for n in range(40))
    for height in range(12, 26):
        lines = drawn(seen(snapshot(why=reason)), Look(tab="processes"), 60, height, footer=keys(Look()))
        assert len(lines) == height
        boxed = [above for above, below in itertools.pairwise(lines) if above.startswith("╭") and below.startswith("╰")]
        assert boxed == [], height


def test_what_was_trained_is_summed_up_from_its_own_column() -> None:
    """The last step of the world has a mean of 1.25; all trained groups are 0 x 8, 1 x 150, 2 x 26."""
    assert any("trained: mean 1.10  max 2  0 violations" in line for line in drawn(seen(snapshot()), width=120))
    nothing = Ages(in_flight=((0, 4),))
    assert any("mean -  max -  0 violations" in line for line in drawn(seen(snapshot(staleness=nothing))))


def test_one_of_a_thing_is_not_called_many() -> None:
    text = "\n".join(drawn(seen(snapshot(violations=1, batch_size=1))))
    assert "1 VIOLATION OF" in text
    assert "1 violation " in text
    assert "window · 1 group a step" in text


def test_a_story_says_how_to_go_back() -> None:
    unknown = OpenStory(headline="group 5: the trace does not contain it", chapters=())
    lines = drawn(seen(snapshot()), Look(story=5), open_story=unknown, footer=keys(Look(story=5)))
    assert lines[-2].endswith(" Esc goes back ─╯")
    assert lines[-1] == " Esc back  ↑,↓ scroll"
    assert "what happened" not in "\n".join(lines), "no columns of nothing"


def test_the_help_of_a_run_says_what_is_true_there() -> None:
    own = Look(help=True, ends_run=True)
    text = "\n".join(drawn(seen(snapshot()), own))
    assert "Ctrl-C         end the run" in text
    assert "leave" not in text
    assert keys(Look(ends_run=True)).plain.startswith(" Ctrl-C end ")
    assert "q, Ctrl-C      leave; the run continues" in "\n".join(drawn(seen(snapshot()), Look(help=True)))
    narrow = drawn(seen(snapshot()), Look(help=True, row=99), 60, 15)
    assert any("is the 24th." in line for line in narrow), "it can be scrolled"


@pytest.mark.parametrize(("width", "cells"), [(80, 5), (140, 16)])
def test_curves_give_way_to_the_numbers_beside_them(width: int, cells: int) -> None:
    many = tuple(float(n) for n in range(30))
    it = dataclasses.replace(seen(snapshot()), losses=many, rewards=many, held_out=(0.4, 0.93))
    (line,) = (line for line in drawn(it, width=width) if "loss" in line)
    assert "held-out 0.40 → 0.93 " in line
    assert len(line.partition("0.001 ")[2].split()[0]) == cells


def test_where_a_run_lies_is_told_whole_and_keys_give_way() -> None:
    folder, own = "runs/quickstart-20261121-053000", Look(ends_run=True)
    told = keys(own, hint=folder, width=80).plain
    assert told == f" Ctrl-C end  ? keys  1-6 lists  s sort  {folder}"
    assert keys(own, hint=folder, width=200).plain.endswith(f" space pause  {folder}")
    assert keys(own, hint="x" * 99, width=80).plain == f" Ctrl-C end  ? keys  {'x' * 99}"


def test_under_the_token_bound_the_masked_share_is_shown() -> None:
    history = History()
    metrics = STATUS.metrics | {"staleness/masked_token_ratio": 0.2}
    window = (WindowStatus(deadline=0, leased=5, pushed=1, occupied=2),)
    shot = snapshot(bound="token", window=window, metrics=metrics)
    history.see(shot)
    text = "\n".join(drawn(board("run", shot, history), Look(), 100, 30))
    assert "20 % masked" in text
    assert "any step" in text
    assert "bound 2, a token" in text


def test_violations_are_never_hidden() -> None:
    lines = drawn(seen(snapshot(violations=3)))
    assert any("3 VIOLATIONS OF THE BOUND" in line for line in lines)
    assert any("3 violations" in line for line in lines)


def test_an_insecure_run_says_so_everywhere() -> None:
    assert any("INSECURE: bound beyond this machine" in line for line in drawn(seen(snapshot(security="insecure"))))
    assert not any("INSECURE" in line for line in drawn(seen(snapshot(security="keys"))) + drawn(seen(snapshot())))
    out = io.StringIO()
    PlainView(out, "run").show(snapshot(security="insecure"))
    assert "INSECURE: bound beyond this machine" in out.getvalue()


def test_the_live_view_leaves_the_summary_and_what_was_said(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False)
    view = LiveView("quickstart", tmp_path, console)
    view.start()
    view.show(snapshot())
    view.notify("rollout-0 died with SIGKILL; restarting it")
    view.stop()
    view.summary(SUMMARY)
    file = console.file
    assert isinstance(file, io.StringIO)
    assert "rollout-0 died with SIGKILL" in file.getvalue()
    assert "0.33 → 0.91" in file.getvalue()


def test_the_plain_view_says_a_line_at_a_new_phase_and_then_now_and_again() -> None:
    out = io.StringIO()
    view = PlainView(out, "quickstart", every_s=1000.0, run_dir=Path("runs/mine"))
    view.start()
    for _ in range(3):
        view.show(snapshot())
    view.show(Snapshot(phase="draining", elapsed_s=90.0, status=STATUS))
    view.stop()
    where, *lines = out.getvalue().splitlines()
    assert where == "run directory: runs/mine"
    assert lines[0] == (
        f"   1:23  training  23/100 steps  reward 0.61  staleness 1.2/2 of 2  980 tokens/s  ({STATUS.why})"
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


def test_a_bar_shows_eighths_and_a_trace_of_what_is_not_nothing() -> None:
    assert [bar(value, 8, 4) for value in (0, 1, 4, 8, 80)] == ["", "▌", "██", "████", "████"]
    assert (bar(1, 1000, 4), bar(1, 0, 4)) == ("▏", "")


def test_large_numbers_are_short() -> None:
    assert [short(value) for value in (None, 0, 7, 950, 1234, 34_000, 5.6e6)] == [
        "-",
        "0",
        "7",
        "950",
        "1.2k",
        "34k",
        "5.6M",
    ]
    assert [amount(value) for value in (0, 999, 12_345, 4e9)] == ["0 B", "999 B", "12.3 KB", "4.0 GB"]
    assert [span(value) for value in (0.123, 12.34, 245)] == ["0.12 s", "12.3 s", "4:05"]


def test_a_meter_never_overflows() -> None:
    assert meter([4, 2, 2], 8, 24) == [12, 6, 6]
    assert meter([8, 8, 8], 8, 24) == [24, 0, 0]
    assert meter([0, 0, 0], 0, 24) == [0, 0, 0]
