"""Rollout workers with different settings serve one run, each by its own capacity."""

import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from staleflow.configs.loading.load import addresses, read_run
from staleflow.configs.rules.coordination import groups_held
from staleflow.protocols.coordination.overbooking import MAX_OVERBOOKING
from tests.process.running import END_S, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

NARROW, WIDE, GUEST = 4, 32, 8
GROUP_SIZE = 4
POOLS = f"rollout.pool=[{{max_inflight={NARROW}}}, {{max_inflight={WIDE}, threads=2}}]"


def attach(run: Run, *words: str) -> "subprocess.Popen[str]":
    """Attach an engine as another host would: it knows the scheduler's address only."""
    place = ("--connect", addresses(read_run(run.run_dir), run.run_dir).scheduler)
    command = [sys.executable, "-m", "staleflow.cli", "attach", "rollout", *place, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_push(run: Run, name: str) -> None:
    deadline = time.monotonic() + END_S
    while not any(str(e["worker"]).startswith(f"{name}.") for e in run.events() if e["ev"] == "push"):
        assert run.process.poll() is None, run.finish(5)
        assert time.monotonic() < deadline, run.tally()
        time.sleep(0.5)


def at_once(run: Run) -> dict[str, int]:
    """Return the largest number of leases that each worker had at once, by its name."""
    leases, most = dict[int, str](), defaultdict[str, int](int)
    for event in run.events():
        if event["ev"] == "reserve":
            name = str(event["worker"]).partition(".")[0]
            leases[event["lease"]] = name
            most[name] = max(most[name], sum(other == name for other in leases.values()))
        elif event["ev"] in ("push", "release"):
            leases.pop(event["lease"], None)
    return most


def test_workers_of_different_sizes_share_a_run(run_dir: Path) -> None:
    endless = ("rollout.workers=1", "trainer.steps=5000", "staleness.max_staleness=3")
    with Run(run_dir, "simulated.toml", POOLS, *endless) as run:
        run.wait_for("reserve", 1, END_S)
        guest = attach(run, "--name", "guest", f"rollout.max_inflight={GUEST}")
        try:
            wait_for_push(run, "guest")
            assert run.drain(guest) == [0]
            output = run.finish(END_S)
        finally:
            guest.kill()
            guest.communicate()
    assert run.process.returncode == 0, output
    audited(run_dir, "consume=2")
    capacity = {
        name: groups_held(slots, GROUP_SIZE)
        for name, slots in {"rollout-0": NARROW, "rollout-1": WIDE, "guest": GUEST}.items()
    }
    busiest = at_once(run)
    # More groups than its capacity only while the last samples of others leave slots free.
    assert all(0 < busiest[name] <= MAX_OVERBOOKING * most for name, most in capacity.items()), busiest
    assert busiest["rollout-1"] > capacity["rollout-0"]
    for name in ("rollout-0", "rollout-1"):
        log = (run_dir / "logs" / f"{name}.log").read_text()
        assert re.search(rf"simulated engine, {capacity[name]} groups", log)
