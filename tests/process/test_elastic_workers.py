"""The supervisor starts and lets go the rollout workers that the scheduler wants, as measured in the run."""

import signal
from pathlib import Path

import pytest

from tests.process.running import END_S, Run, audited

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("machine")]

POOLS = "[{workers=1, simulated={k2=0.03, sigma=0.2}}, {workers=1, simulated={k2=0.006, sigma=0.2}}]"
"""A slow engine and a fast one, which together starve the trainer; two fast ones feed it."""


def names(run: Run, ev: str) -> set[str]:
    events = [e for e in run.events() if e["ev"] == ev and e["role"] == "rollout"]
    return {str(e["worker"]).partition(".")[0] for e in events}


def test_a_starved_run_gets_a_fast_engine_and_lets_the_slow_one_go(run_dir: Path) -> None:
    limits = ("rollout.elastic.max_workers=3", "rollout.workers=1", f"rollout.pool={POOLS}", "trainer.steps=100000")
    with Run(run_dir, "simulated.toml", *limits, "trainer.simulated_step_s=0.25") as run:
        run.wait_for("detach", 1, END_S, role="rollout", why="drained")
        run.wait_for("attach", 3, END_S, role="rollout")
        assert names(run, "attach") == {"rollout-0", "rollout-1", "rollout-2"}
        assert names(run, "detach") == {"rollout-0"}
        assert run.count("release") == 0, "a worker that is let go loses no group"
        run.wait_for("consume", run.count("consume") + 3, END_S)
        run.process.send_signal(signal.SIGINT)
        output = run.finish(END_S)
    assert "rollout-2 starts (rollout workers wanted: " in output
    assert "rollout-0 has left (rollout workers wanted: " in output
    summary = run.summary()
    assert (summary["outcome"], summary["violations"], summary["restarts"]) == ("interrupted", 0, {})
    audited(run_dir, "consume=10")
