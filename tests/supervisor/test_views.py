"""A failing view does not end the run."""

import errno
import io
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.monitor.plain import PlainView
from staleflow.supervisor import rundir, summary
from staleflow.supervisor import supervisor as supervisor_module
from staleflow.supervisor.lifeline import Lifeline
from staleflow.supervisor.summary import Summary
from staleflow.supervisor.supervisor import Supervisor
from staleflow.supervisor.view import SafeView, Snapshot
from tests.supervisor.test_supervisor import QUICK, SIMULATED

pytestmark = pytest.mark.xdist_group("machine")


class Blind:
    """A view that raises on every update and records its messages."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def show(self, snapshot: Snapshot) -> None:
        raise ValueError("cannot convert float NaN to integer")

    def notify(self, text: str) -> None:
        self.heard.append(text)

    def summary(self, summary: Summary) -> None:
        self.heard.append(summary.outcome)


def test_a_view_that_raises_says_so_once_and_the_run_goes_on(short_dir: Path) -> None:
    view, config, run_dir = Blind(), load(SIMULATED, QUICK), short_dir / "run"
    with rundir.claim(config, run_dir, resume=False):
        assert Supervisor(config, run_dir, view, "").run() == 0, view.heard
    said = "the display failed, the run continues: ValueError: cannot convert float NaN to integer"
    assert view.heard == [said, "finished"]


def test_a_run_whose_first_process_cannot_be_started_has_its_ending(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", never)
    view, config, run_dir = Blind(), load(SIMULATED, QUICK), short_dir / "run"
    with rundir.claim(config, run_dir, resume=False):
        assert Supervisor(config, run_dir, view, "again").run() == 1
    error = "scheduler could not be started: [Errno 11] Resource temporarily unavailable"
    assert f"the run failed: {error}" in view.heard
    assert view.heard[-2:] == ["failed", "resume with: again"]
    done = summary.read(run_dir)
    assert done is not None
    assert (done.outcome, done.error) == ("failed", error)


def test_a_view_whose_disk_is_full_ends_nothing() -> None:
    summary = Summary(name="a", run_dir="run", outcome="finished", steps_wanted=1, max_staleness=0, bound="samples")
    with io.TextIOWrapper(Path("/dev/full").open("wb", buffering=0), write_through=True) as full:
        plain = PlainView(full, "a", run_dir=Path("run"))

        def calls(view: PlainView | SafeView) -> list[Callable[[], None]]:
            return [
                view.start,
                partial(view.show, Snapshot(phase="training", elapsed_s=1.0)),
                partial(view.notify, "rollout-0 died with SIGKILL; restarting it"),
                partial(view.summary, summary),
            ]

        for call in calls(plain):
            with pytest.raises(OSError, match="No space left on device"):
                call()
        for call in calls(SafeView(PlainView(full, "a", run_dir=Path("run")))):
            call()


def test_an_error_of_the_system_that_is_no_lost_terminal_is_said(short_dir: Path) -> None:
    class Cut(Blind):
        def show(self, snapshot: Snapshot) -> None:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    view = Cut()
    for _ in range(2):
        SafeView(view).show(Snapshot(phase="training", elapsed_s=1.0))
    assert len(view.heard) == 2
    seen = SafeView(view)
    for _ in range(2):
        seen.show(Snapshot(phase="training", elapsed_s=1.0))
    assert len(view.heard) == 3, "once a view"


def test_a_run_whose_summary_finds_no_room_is_told_all_the_same(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Blind):
        def show(self, snapshot: Snapshot) -> None: ...

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(supervisor_module, "write", full)
    view, config, run_dir = Seen(), load(SIMULATED, QUICK), short_dir / "run"
    with rundir.claim(config, run_dir, resume=False):
        assert Supervisor(config, run_dir, view, "").run() == 0, view.heard
    assert view.heard == ["summary.json could not be written: [Errno 28] No space left on device", "finished"]


def test_children_and_the_view_are_let_go_of_whatever_the_end_raises(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[str]()

    class Watched(Blind):
        def stop(self) -> None:
            ended.append("view")

    def closes(lifeline: Lifeline) -> None:
        close(lifeline)
        ended.append("lifeline")

    def of_another_version(*_: object) -> tuple[str, str]:
        raise ConfigError("protocol of ipc:///run", 5, "this client speaks 6")

    def fails(*_: object) -> None:
        ended.append("drain")
        raise RuntimeError

    close = Lifeline.close
    monkeypatch.setattr(Lifeline, "close", closes)
    monkeypatch.setattr(Supervisor, "_outcome", of_another_version)
    monkeypatch.setattr(supervisor_module, "drain", fails)
    config, run_dir = load(SIMULATED, QUICK), short_dir / "run"
    with rundir.claim(config, run_dir, resume=False), pytest.raises(RuntimeError):
        Supervisor(config, run_dir, Watched(), "").run()
    assert ended == ["drain", "lifeline", "view"]
