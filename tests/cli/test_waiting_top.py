"""``staleflow top`` waits for a run whose scheduler has not started because its model is still being built."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from staleflow.cli import top
from staleflow.supervisor import addresses, rundir


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "POLL_INTERVAL_S", 0.0)


def played(monkeypatch: pytest.MonkeyPatch, holders: list[str | None], answers: list[bool]) -> Iterator[str | None]:
    """Script the holder of the directory and the state of the address at each poll; return the holders not polled."""
    held, heard = iter(holders), iter(answers)

    def holder(run_dir: Path) -> str | None:
        return next(held)

    def may_answer(address: str) -> bool:
        return next(heard)

    monkeypatch.setattr(rundir, "holder", holder)
    monkeypatch.setattr(addresses, "may_answer", may_answer)
    return held


@pytest.mark.parametrize(
    ("holders", "answers"),
    [(["7", "7", "7", "7"], [False, False, True]), (["7", "7", None], [False]), ([None], [])],
    ids=["until it listens", "until who started it is gone", "not where nobody starts it"],
)
def test_on_a_terminal_it_waits(
    monkeypatch: pytest.MonkeyPatch, holders: list[str | None], answers: list[bool]
) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal())
    left = played(monkeypatch, holders, answers)
    top.wait_for_start(Path("r"), "ipc:///r")
    assert list(left) == []


def test_elsewhere_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    left = played(monkeypatch, ["7", "7"], [])
    top.wait_for_start(Path("r"), "ipc:///r")
    assert list(left) == ["7"]
