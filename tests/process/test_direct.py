"""Engines receive weights directly from the trainer in a whole run, and one of them dies and returns."""

from collections import Counter
from pathlib import Path

import pytest

from tests.process.running import END_S, Run, audited

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("machine")]


def ways(run_dir: Path, worker: str) -> Counter[str]:
    """Count the worker's version transfers by path."""
    lines = (run_dir / "logs" / f"{worker}.log").read_text().splitlines()
    return Counter(line.rpartition("is loaded, ")[2] for line in lines if "is loaded, " in line)


def test_engines_load_from_the_trainer_and_one_that_comes_back_does_too(run_dir: Path) -> None:
    with Run(run_dir, "direct.toml", "model.options.steps=1", "trainer.steps=12", "scheduler.lease_s=3.0") as run:
        run.wait_for("consume", 2, END_S)
        run.kill("attach", "rollout", "rollout-0")
        run.wait_for("attach", run.count("attach") + 1, END_S)
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert (run.summary()["violations"], run.summary()["outcome"]) == (0, "finished")
    audited(run_dir, "consume=12", "publish=13", "pull=6")
    assert ways(run_dir, "rollout-1")["from the trainer"] >= 8
    assert ways(run_dir, "rollout-0")["from the trainer"] >= 4
