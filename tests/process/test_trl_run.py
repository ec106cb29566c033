"""The real ``AsyncGRPOTrainer`` of TRL trains a real run, and its trace is audited."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

from tests.process.running import END_S, ROOT, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

REWARD = ROOT / "tests" / "clients" / "user_code" / "rewards.py"
"""Differs within a group also for an untrained model."""
SMALL = ("model.options.steps=20", "trainer.batch_size=4", "rollout.group_size=4", "trainer.checkpoint_every=2")


def test_trl_trains_each_group_once_and_continues_from_its_checkpoint_after_a_kill(run_dir: Path) -> None:
    with Run(run_dir, "trl.toml", *SMALL, f"reward.run={REWARD}:length", "trainer.steps=100000") as run:
        run.wait_for("checkpoint", 2, END_S)  # versions 0 and 2
        run.kill("attach", "train")
        run.wait_for("join", 2, END_S)
        run.wait_for("consume", run.count("consume") + 4, END_S)
        run.drain()
        output = run.finish(END_S)
        assert run.process.returncode == 0, output
    summary = run.summary()
    assert [summary["outcome"], summary["restarts"]["trainer"]] == ["drained", 1]
    audited(run_dir, "join=2", f"consume={summary['steps']}")
    joins = [event["checkpoint"] for event in run.events() if event["ev"] == "join"]
    assert joins[0] == {"lineage": 0, "version": 0}
    assert joins[1]["version"] >= 2
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "grad_norm", "lr", "reward/mean"} <= set(lines[-1])
    weights = [event["sha"] for event in run.events() if event["ev"] == "publish"]
    assert len(set(weights)) >= summary["steps"], "every step changes the weights"
