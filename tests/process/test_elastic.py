"""Engines join and leave while a run continues: one, then eight, then three."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.process.running import END_S, Run, audited, name_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("machine")]

SMALL = (
    "rollout.workers=1",
    "rollout.handover_s=60",
    "trainer.steps=5000",
    "trainer.simulated_step_s=0.05",
    "scheduler.lease_s=20.0",
)
"""Overrides for a run that ends only on request."""
JOINING = [f"guest-{number}" for number in range(7)]
LEAVING, KILLED, STAYING = JOINING[:3], JOINING[3:5], JOINING[5:]


def attach(run_dir: Path, name: str) -> "subprocess.Popen[str]":
    """Attach an engine as a user would from another terminal."""
    command = [sys.executable, "-m", "staleflow.cli", "attach", "rollout", "--run-dir", str(run_dir), "--name", name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextlib.contextmanager
def joined(run: Run) -> Generator[dict[str, "subprocess.Popen[str]"]]:
    """Attach seven engines; leaving the context ends all of them."""
    guests = {name: attach(run.run_dir, name) for name in JOINING}
    try:
        yield guests
    finally:
        for guest in guests.values():
            guest.kill()
            guest.communicate()


def pushing(run: Run, after: int = 0) -> set[str]:
    """Names of the engines that have pushed a group after event number ``after``."""
    return {name_of(e["worker"]) for e in run.events() if e["ev"] == "push" and e["seq"] > after}


def last(run: Run) -> int:
    return max(int(e["seq"]) for e in run.events())


def until(run: Run, names: set[str], after: int = 0) -> None:
    """Wait until exactly these engines have pushed a group after event number ``after``."""
    deadline = time.monotonic() + END_S
    while pushing(run, after) != names:
        assert run.process.poll() is None, run.finish(5)
        assert time.monotonic() < deadline, f"{sorted(pushing(run, after))} push, not {sorted(names)}"
        time.sleep(0.1)


def left(run: Run) -> dict[str, str]:
    """Reasons for which engines have left, by name."""
    return {name_of(e["worker"]): e["why"] for e in run.events() if e["ev"] == "detach" and e["role"] == "rollout"}


def test_engines_join_and_leave_a_run_that_goes_on(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", *SMALL) as run:
        run.wait_for("consume", 2, END_S)
        assert pushing(run) == {"rollout-0"}
        with joined(run) as guests:
            until(run, {"rollout-0", *JOINING})
            refused = attach(run_dir, "rollout-0")
            said, _ = refused.communicate(timeout=END_S)
            assert (refused.returncode, said.count("\n")) == (2, 1), said
            assert "rollout-0 belongs to the supervisor of this run" in said
            for name in LEAVING:
                guests[name].send_signal(signal.SIGTERM)
            for name in KILLED:
                guests[name].kill()
            assert [guests[name].wait(END_S) for name in LEAVING] == [0, 0, 0]
            deadline = time.monotonic() + END_S
            while not set(KILLED) <= left(run).keys():
                assert run.process.poll() is None, run.finish(5)
                assert time.monotonic() < deadline, left(run)
                time.sleep(0.1)
            until(run, {"rollout-0", *STAYING}, after=last(run))
            steps = run.count("consume")
            run.wait_for("consume", steps + 5, END_S)
            assert run.drain(*(guests[name] for name in STAYING)) == [0, 0]
            output = run.finish(END_S)
    assert run.process.returncode == 0, output
    summary = run.summary()
    assert (summary["outcome"], summary["violations"], summary["restarts"]) == ("drained", 0, {})
    audited(run_dir, "consume=10", "close=1")
    why = left(run)
    assert [why[name] for name in LEAVING] == ["SIGTERM"] * 3
    assert [why[name] for name in KILLED] == ["silent"] * 2
    holder = {e["lease"]: name_of(e["worker"]) for e in run.events() if e["ev"] == "reserve"}
    reserved = {(e["seq"], e["group"]) for e in run.events() if e["ev"] == "reserve"}
    released = [e for e in run.events() if e["ev"] == "release"]
    assert {e["why"] for e in released} <= {"aborted", "expired"}
    of_leaving = [e for e in released if holder[e["lease"]] in LEAVING]
    # a move is a release and, in the same transaction, a reservation for another worker
    assert all((e["seq"] + 1, e["group"]) in reserved for e in of_leaving), "they handed over all that they had left"
