"""The shipped environment trains in a whole run: every process, a real model, a tool call between its turns."""

import json
from pathlib import Path

import pytest

from tests.process.running import END_S, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

SMALL = (
    *("trainer.steps=4", "trainer.eval_every=2", "trainer.eval_prompts=16"),
    *("rollout.workers=1", "model.options.steps=80", "model.options.limit=20"),
)


@pytest.mark.slow
def test_a_model_with_a_calculator_is_trained_end_to_end(run_dir: Path) -> None:
    with Run(run_dir, "environment.toml", *SMALL, "prompts.options.limit=20", "rollout.filter=none") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    summary = run.summary()
    assert (summary["steps"], summary["violations"], summary["outcome"]) == (4, 0, "finished")
    audited(run_dir, "consume=4", "publish=5", "open=1", "close=1")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    assert len(trained) == 4
    assert all(line["mismatch_kl"] < 0.5 for line in trained)
    assert all(2 <= line["length/mean"] <= 16 for line in trained), "the tool's tokens were counted as the model's"
    held_out = {line["step"]: line for line in lines if "reward/eval" in line}
    assert sorted(held_out) == [-1, 1, 3]
    assert all(0 <= line["reward/eval"] <= 1 and 2 <= line["length/eval"] <= 16 for line in held_out.values())
    assert not any("reward/eval_failed" in line for line in lines)


def test_an_environment_that_fails_now_and_then_costs_its_groups_only(run_dir: Path) -> None:
    bad = Path(__file__).parent / "moody_environment.py"
    arguments = (f"environment.run={bad}:Moody", 'reward.run=""', "trainer.steps=10", "rollout.filter=none")
    with Run(run_dir, "simulated.toml", *arguments) as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert (run.summary()["steps"], run.summary()["restarts"]) == (10, {})
    audited(run_dir, "consume=10", "release=1")
    assert run.count("release", why="aborted") > 0
    logs = [path.read_text() for path in (run_dir / "logs").glob("rollout-*.log")]
    assert any(
        "released, at rollout-" in log and "the environment raised RuntimeError: not today" in log for log in logs
    )
