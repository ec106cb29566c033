"""A forged trace or status gives one clear error line, and none of its bytes control the reader's terminal."""

import itertools
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from staleflow.cli.main import main
from staleflow.configs.loading.load import RESOLVED, to_json
from staleflow.trace.reader import FIELDS
from tests.report.traces import PLAIN, attach, consume, event, publish, save, sealed, written
from tests.sim.test_plan import config

EVIL = "\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b2J\r\n[bold red on white]x[/foo]\u202e"
"""Sequences that change a terminal's title, clipboard or screen; rich's markup; right-to-left text."""
GONE = object()
NESTED: Any = msgspec.json.decode("[" * 100 + "]" * 100)
VALUES: tuple[Any, ...] = (
    *(GONE, None, True, -1, 0, 1, 3, 10**6, 2**50, 2**50 + 1, 2**63 - 1, 2**63, 10**400, -(10**18), 0.5, 1e308),
    *("", "x", EVIL, [], {}, [EVIL], {EVIL: EVIL}, [{}], NESTED),
)
LIFE = [
    *PLAIN[:-1],
    event("auth", 12, peer="evil", role="rollout", ok=False, why="no key", count=1),
    event("reserve", 12, group=3, lease=3, worker="rollout-0.aa", version=2, deadline=4),
    event("reserve", 12, group=4, lease=4, worker="rollout-0.aa", version=2, deadline=4, spare=True),
    event("push", 13, group=4, lease=4, segments=[{"lineage": 0, "version": 2, "tokens": 10}]),
    event("occupy", 13, group=4),
    event("promote", 13, group=4, demoted=3),
    event("claim", 13, group=4, step=2),
    event("release", 14, group=3, lease=3, tokens=4, why="expired"),
    event("reject", 14, op="push", worker="rollout-0.aa", group=3, lease=3, count=2, code="stale_lease"),
    sealed(15, 3, 2, 4, 2),
    event("unseal", 15, batch=3, why="quarantine"),
    event("drop", 15, group=4, tokens=10, why="quarantine"),
    event("checkpoint", 15, lineage=0, version=1, trainer_term=1),
    event("rollback", 16, lineage=1, from_lineage=0, to_version=1),
    *written(5, 1, reserved_s=17, pushed_s=18, occupied_s=19),
    sealed(20, 4, 1, 5, 1, lineage=1),
    consume(21, 4, 1),
    publish(21, 2, lineage=1),
    event("overload", 22, on=True, resource="disk", used=0.91, limit=0.9),
    event("detach", 23, worker="rollout-0.aa", role="rollout", why="silent"),
    attach(24, "rollout-0.bb", "rollout", "heard again"),
    event("tomorrow", 25, worker="rollout-0.bb", members=[1]),
    PLAIN[-1] | {"t": 1030 * 10**9, "m": 130 * 10**9},
]
"""One line of every kind, and one of an unknown kind."""
VERBS = (
    ("top", "--replay", "--once"),
    ("top", "--replay", "--json", "--speed", "1000"),
    ("report",),
    ("trace", "check"),
    ("trace", "show", "4"),
    ("trace", "plot", "--out", "lanes.html"),
)
TIMES = ("t", "m", "inc", "seq", "run", "ev")
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def mutations(lines: list[dict[str, Any]]) -> Iterator[tuple[int, str, Any]]:
    """(line, field, value): each field of each kind once with each value; ``TIMES`` for the first line and one
    other."""
    seen: set[tuple[str, str]] = set()
    for number, line in enumerate(lines):
        for field in [*line, "more", "members"]:
            about = "" if field in TIMES and number else line["ev"], field
            if about not in seen:
                seen.add(about)
                yield from ((number, field, value) for value in VALUES)


def mutated(lines: list[dict[str, Any]], number: int, field: str, value: Any) -> list[dict[str, Any]]:
    line = {**lines[number], field: value}
    if value is GONE:
        del line[field]
    return [*lines[:number], line, *lines[number + 1 :]]


def controls(text: str) -> set[str]:
    """Control characters of a terminal, except line ends and rich's colours."""
    return {letter for letter in STYLE.sub("", text) if not letter.isprintable()} - {"\n"}


def ask(run_dir: Path, verb: tuple[str, ...]) -> int:
    """Exit code of a verb that runs in its run directory."""
    words = list(verb)
    words.insert(2 if words[0] == "trace" else 1, str(run_dir))
    return main(words)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with a configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / RESOLVED).write_bytes(to_json(config()))
    return tmp_path


def test_every_kind_of_line_is_forged_here() -> None:
    kinds = {line["ev"] for line in LIFE}
    assert kinds == {*FIELDS, "tomorrow"}


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_the_trace_itself_is_read(run_dir: Path, verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    save(run_dir, LIFE)
    assert ask(run_dir, verb) == (1 if verb[1:] == ("check",) else 0), capsys.readouterr().err


def test_a_forged_line_is_told_in_one_line_or_read(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def too_long(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"{about} takes seconds")

    # processor time, not time: a loaded machine may stop a test for seconds. A verb that only waits is not caught
    before = signal.signal(signal.SIGPROF, too_long), signal.getsignal(signal.SIGTERM)
    sample = random.Random(7).sample(list(mutations(LIFE)), 300)
    try:
        for (number, field, value), verb in zip(sample, itertools.cycle(VERBS), strict=False):
            about = f"{verb}: {LIFE[number]['ev']}.{field} = {str(value)[:40]}"
            save(run_dir, mutated(LIFE, number, field, value))
            signal.setitimer(signal.ITIMER_PROF, 5)
            code = ask(run_dir, verb)
            signal.setitimer(signal.ITIMER_PROF, 0)
            said = capsys.readouterr()
            assert code in (0, 1, 2), about
            assert code != 2 or (said.err.startswith("staleflow: ") and said.err.count("\n") == 1), about
            assert not controls(said.out + said.err), about
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGTERM, before[1])  # top replaces the handler


def test_each_rule_has_all_its_violations_beside_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staleflow.trace.audit.report.MAX_VIOLATIONS", 1)
    save(run_dir, PLAIN[:2])  # without a schema and a hash
    assert ask(run_dir, ("trace", "check")) == 1
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ every line is")]
    assert row.split("│")[3].strip() == "2"
