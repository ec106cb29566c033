"""Groups pass a model after the reward in whole runs: a reference model for divergence, a critic for values."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.process.running import END_S, Run, audited

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("machine")]

SMALL = (
    *("model.options.steps=10", "trainer.steps=100000", "trainer.eval_every=0", "trainer.eval_prompts=0"),
    *("rollout.filter=none", "rollout.workers=1"),
)


def survived(run_dir: Path, run: Run, killed: str) -> int:
    """Kill a worker, and drain the run once it trains again; return the number of steps that it has trained.

    Check that the run broke no rule and lost no group.
    """
    run.kill("attach", killed)
    run.wait_for_second(killed)
    run.wait_for("consume", run.count("consume") + 4, END_S)
    run.drain()
    output = run.finish(END_S)
    assert run.process.returncode == 0, output
    summary = run.summary()
    steps: int = summary["steps"]
    assert (summary["violations"], summary["outcome"]) == (0, "drained")
    assert (summary["restarts"], summary["groups_lost"]) == ({killed: 1}, {})
    audited(run_dir, f"consume={steps}", f"publish={steps + 1}", "close=1")
    return steps


def log_of(run_dir: Path, name: str) -> str:
    return (run_dir / "logs" / f"{name}.log").read_text()


@pytest.mark.long
def test_a_run_with_divergence_survives_the_death_of_a_reference_worker(run_dir: Path) -> None:
    overrides = ("trainer.algorithm.kl_coef=0.05", "reference.workers=2")
    with Run(run_dir, "smoke.toml", *SMALL, *overrides) as run:
        run.wait_for("consume", 1, END_S)
        steps = survived(run_dir, run, killed="reference-0")
    attached = {e["worker"].partition(".")[0] for e in run.events() if e["ev"] == "attach" and e["role"] == "stage"}
    assert attached == {"reference-0", "reference-1", "reward-0"}
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["kl/reference"] >= 0 for line in lines if "loss" in line] == [True] * steps


def test_a_run_with_a_critic_that_learns_and_survives_its_death(run_dir: Path) -> None:
    overrides = ("trainer.algorithm.advantage=gae", "critic.batch=2", "critic.lr=1e-3", "trainer.checkpoint_every=1")
    with Run(run_dir, "smoke.toml", *SMALL, *overrides) as run:
        run.wait_for("consume", 1, END_S)
        deadline = time.monotonic() + END_S
        while not [*(run_dir / "critic").glob("*.safetensors")]:  # it may save after the trainer's first step
            assert run.process.poll() is None, run.finish(5)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        survived(run_dir, run, killed="critic-0")
    steps = [
        int(step) for step in re.findall(r"critic step (\d+): loss [\d.]+, explained", log_of(run_dir, "critic-0"))
    ]
    assert steps[-1] >= 4
    went_on = [int(step) for step in re.findall(r"critic resumed after step (\d+)", log_of(run_dir, "critic-0"))]
    assert len(went_on) == 1
    assert went_on[0] >= 1
    assert [*(run_dir / "critic").glob("*.safetensors")]
