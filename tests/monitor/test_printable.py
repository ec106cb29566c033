"""Text from peers is printed without any effect on the terminal, and a value that is not a number stops no view."""

import io
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import structs
from rich.console import Console

from staleflow.cli import status
from staleflow.monitor.ending import print_summary
from staleflow.monitor.history import History
from staleflow.monitor.live import LiveView
from staleflow.monitor.look import TABS, Look
from staleflow.monitor.model import board
from staleflow.monitor.plain import PlainView, line
from staleflow.monitor.screen import OpenStory, dashboard
from staleflow.monitor.story import headline, story
from staleflow.monitor.top import encoded
from staleflow.process.sanitize import json_line, printable, printable_lines
from staleflow.protocols.wire.messages.status import as_dict
from staleflow.supervisor.summary import Summary
from staleflow.supervisor.view import Snapshot
from tests.cli.test_forged_traces import EVIL, LIFE, controls
from tests.monitor.world import NOW_S, PARAMETERS, STATUS

KNOWN = ("trajectory", "token", "wait")
"""Values that the scheduler chooses; peers cannot influence them."""
METRICS = {
    "step": 3,
    "reward/mean": 0.5,
    "loss": 0.1,
    "reward/eval": 0.5,
    "off_policy/max": 1.0,
    "off_policy/mean": 0.5,
}
TIMES = {
    "time/step": 1.0,
    "time/wait_for_batch": 0.5,
    "perf/tokens_per_second": 7.0,
    "staleness/masked_token_ratio": 0.1,
}


def forged(value: Any, text: Callable[[str], str], number: Callable[[float], float]) -> Any:
    if isinstance(value, dict):
        return {key: inner if key in ("ev", "t") else forged(inner, text, number) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, msgspec.Struct):
        fields = {name: forged(getattr(value, name), text, number) for name in value.__struct_fields__}
        return structs.replace(value, **fields)
    if isinstance(value, list | tuple):
        return tuple(forged(inner, text, number) for inner in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, str):
        return value if value in KNOWN else text(value)
    return number(value) if isinstance(value, float) else value


def snapshot(text: Callable[[str], str], number: Callable[[float], float], step: int = 3) -> Snapshot:
    told = forged(structs.replace(STATUS, metrics=METRICS | TIMES), text, number)
    lines = forged([METRICS | TIMES | {"step": step}], text, number)
    return Snapshot(
        phase="training",
        elapsed_s=60.0 + step,
        status=told,
        lines=tuple(lines),
        parameters=forged(PARAMETERS, text, number),
        detail=text("loading"),
        unix_s=NOW_S,
    )


def renderings(*shots: Snapshot) -> str:
    """All texts that staleflow prints about a run."""
    history = History()
    for shot in shots:
        history.see(shot)
    it, to = board(EVIL, shots[-1], history), io.StringIO()
    console = Console(file=to, force_terminal=True, width=200, height=60)
    open_story = OpenStory(headline=headline(LIFE_OF_EVIL, 4), chapters=story(LIFE_OF_EVIL, 4))
    for tab in TABS:
        for width, height in ((80, 24), (200, 60)):
            console.print(dashboard(it, Look(tab=tab), width, height))
    console.print(dashboard(it, Look(story=4), 200, 60, open_story=open_story))
    plain = PlainView(to, EVIL)
    plain.show(shots[-1])
    plain.notify(EVIL)
    print(line(it), encoded(it), json_line(as_dict(shots[-1].status)), file=to)
    return to.getvalue()


ABOUT = [line for line in LIFE if line.get("group") == 4 or line.get("batch") == 3]
LIFE_OF_EVIL = forged(ABOUT, lambda text: EVIL + text, lambda number: number)


def test_nothing_of_a_forged_status_or_story_reaches_the_terminal() -> None:
    shown = renderings(snapshot(lambda text: EVIL + text, lambda number: number))
    assert controls(shown) == set()
    assert "\\x1b]0;title" in shown, "it is shown, not left out"


def test_why_says_what_the_scheduler_said_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    status._why(forged(STATUS, lambda text: EVIL + text, lambda number: number))  # pyright: ignore[reportPrivateUsage]
    status._show(forged(STATUS, lambda text: EVIL + text, lambda number: number), None)  # pyright: ignore[reportPrivateUsage]
    status._print_json({EVIL: EVIL})  # pyright: ignore[reportPrivateUsage]
    assert controls(capsys.readouterr().out) == set()


def test_the_end_of_a_run_and_what_its_processes_said_are_shown_too() -> None:
    to = io.StringIO()
    console = Console(file=to, force_terminal=True, width=100)
    ended = Summary(name=EVIL, run_dir=EVIL, outcome=EVIL, error=EVIL, steps_wanted=1, max_staleness=1, bound=EVIL)
    print_summary(ended, console)
    PlainView(to, "x", summary_to=to).summary(ended)
    console.file = to
    assert controls(to.getvalue()) == set()


def test_the_live_view_says_it_as_text(tmp_path: Any) -> None:
    to = io.StringIO()
    LiveView("x", tmp_path, Console(file=to, width=80, highlight=False)).notify(f"rollout-0 died\n  {EVIL}")
    assert controls(to.getvalue()) == set()
    assert to.getvalue().splitlines()[0] == "rollout-0 died"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e-320, 0.0, -1.0], ids=repr)
def test_a_number_that_is_none_stops_no_view(bad: float) -> None:
    every = [snapshot(str, lambda _: bad, step) for step in range(4)]
    mixed = [snapshot(str, lambda good, odd=step % 2: -bad if odd else good, step) for step in range(4)]  # type: ignore[misc]
    assert controls(renderings(*every)) == set()
    assert controls(renderings(*mixed)) == set()


def test_text_that_is_harmless_stays_as_it_is() -> None:
    assert printable("rollout-0 → 日本 é ☃") == "rollout-0 → 日本 é ☃"
    assert printable("a\nb\x9bc\x7f\u202ed") == "a\\x0ab\\x9bc\\x7f\\u202ed"
    assert printable_lines("a\nb\x1b") == "a\nb\\x1b"
    assert json_line({"a": "\x9b\x1b"}) == '{"a":"\\u009b\\u001b"}'
