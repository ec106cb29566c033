"""Whoever looks at a run does not end it."""

from pathlib import Path

import pytest

from staleflow.configs.load import load
from staleflow.supervisor import rundir
from staleflow.supervisor.summary import Summary
from staleflow.supervisor.supervisor import Supervisor
from staleflow.supervisor.view import Snapshot
from tests.supervisor.test_supervisor import QUICK, SIMULATED

pytestmark = [pytest.mark.xdist_group("machine"), pytest.mark.timeout(180)]


class Blind:
    """A view that raises whenever it is shown anything, and keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def show(self, snapshot: Snapshot) -> None:
        raise ValueError("cannot convert float NaN to integer")

    def say(self, text: str) -> None:
        self.heard.append(text)

    def summary(self, summary: Summary) -> None:
        self.heard.append(summary.outcome)


def test_a_view_that_raises_says_so_once_and_the_run_goes_on(short_dir: Path) -> None:
    view, config, run_dir = Blind(), load(SIMULATED, QUICK), short_dir / "run"
    with rundir.claim(config, run_dir, resume=False):
        assert Supervisor(config, run_dir, view, "").run() == 0, view.heard
    said = "what is shown here failed, the run goes on: ValueError: cannot convert float NaN to integer"
    assert view.heard == [said, "finished"]
