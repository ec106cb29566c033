"""``staleflow chaos`` injects eight faults of every kind into a whole training run, as a user would start it."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from staleflow.supervisor.chaos import Kind, victims
from tests.process.running import END_S, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

FAULTS = 8
LONG = "trainer.steps=100000"
"""More steps than a test has time for: it ends the run."""
SMALL = ("trainer.checkpoint_every=5", "scheduler.lease_s=2.0", "rollout.workers=2")
ROLES = {"scheduler", "trajectories-0", "parameters", "rollout-0", "rollout-1", "reward-0", "trainer"}


def chaos(run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "staleflow.cli", "chaos", str(run_dir), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=END_S)


def test_a_run_survives_eight_faults_of_every_kind(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", *SMALL, LONG, "trainer.simulated_step_s=0.3") as run:
        run.wait_for("consume", 3, END_S)
        assert {victim.name for victim in victims(run_dir)} == ROLES
        told = chaos(run_dir, "--faults", str(FAULTS), "--every", "1.5", "--seed", "4", "--json")
        run.drain()
        output = run.finish(END_S)
    assert told.returncode == 0, told.stdout + told.stderr
    faults = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(faults) == FAULTS
    assert set(Counter(fault["kind"] for fault in faults)) == {kind.value for kind in Kind}
    assert len({fault["name"] for fault in faults}) >= 4
    assert run.process.returncode == 0, output
    summary = run.summary()
    assert (summary["violations"], summary["outcome"]) == (0, "drained")
    audited(run_dir, f"consume={summary['steps']}", "close=1")


def test_what_was_stopped_goes_on_whoever_ends_the_chaos(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", LONG) as run:
        run.wait_for("consume", 2, END_S)
        command = [sys.executable, "-m", "staleflow.cli", "chaos", str(run_dir), "--kind", "stop", "--only", "reward"]
        with subprocess.Popen([*command, "--stop-for", "60"], stdout=subprocess.PIPE, text=True) as harming:
            assert harming.stdout is not None
            assert "stop  reward-0" in harming.stdout.readline()
            (victim,) = (one.process for one in victims(run_dir) if one.name == "reward-0")
            deadline = time.monotonic() + END_S
            while victim.status() != psutil.STATUS_STOPPED:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            harming.terminate()
        assert victim.status() != psutil.STATUS_STOPPED
        version = run.count("consume")
        run.wait_for("consume", version + 10, END_S)


def test_it_refuses_what_is_not_there(run_dir: Path) -> None:
    said = chaos(run_dir)
    assert (said.returncode, said.stderr.count("\n")) == (2, 1)
    assert "no run was started there" in said.stderr
    with Run(run_dir, "simulated.toml", LONG) as run:
        run.wait_for("consume", 1, END_S)
        said = chaos(run_dir, "--only", "critic")
        assert (said.returncode, said.stdout) == (2, "")
        assert '--only is "critic"; this run has parameters, ' in said.stderr
