"""Rollout workers of a whole run play an evaluation set with a judge, at pinned versions, while the trainer trains."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staleflow.cli.main import main
from tests.process.running import END_S, Run, audited

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("machine")]

JUDGE = Path(__file__).parent / "judge.py"
STEPS = 8


def overrides(hold: Path) -> list[str]:
    stage = f'{{name="judge", run="{JUDGE}:judge", makes=["score"], options={{hold="{hold}"}}, timeout_s=100}}'
    sets = f'{{name="sums", source="{JUDGE}:prompts", every=4}}'
    return [
        *("model.options.steps=10", "rollout.filter=none", "trainer.eval_every=0", "trainer.eval_prompts=0"),
        *(f"trainer.steps={STEPS}", "trainer.checkpoint_every=4", "trainer.keep_checkpoints=3", "trainer.lr=3e-3"),
        *(f"reward.run={JUDGE}:reward", 'reward.needs=["judge/score"]', "reward.probe=false"),
        *(f"stage=[{stage}]", f"eval=[{sets}]"),
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def players(run_dir: Path, version: int) -> list[str]:
    """Return the rollout workers that were ordered to play this version, by name, in the order of their logs."""
    return [
        path.stem
        for path in sorted((run_dir / "logs").glob("rollout-*.log"))
        if re.search(rf"plays \d+ prompts of evaluation sums at version {version}\n", path.read_text())
    ]


def until(run: Run, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_S
    while not true():
        assert run.process.poll() is None, run.finish(5)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_with_a_judge_is_evaluated_at_exact_versions_while_it_trains(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    with Run(run_dir, "smoke.toml", *overrides(hold)) as run:
        until(run, lambda: bool(players(run_dir, 0)))
        run.wait_for("consume", 2, END_S)  # both workers' groups are trained while version 0 is being evaluated
        assert not (run_dir / "evaluations.jsonl").exists()
        (player,) = players(run_dir, 0)
        killed_at = sum(1 for _ in run.events())
        run.kill("attach", player)
        until(run, lambda: "sums at version 0: rollout" in (run_dir / "logs" / "scheduler.log").read_text())
        hold.unlink()
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert run.summary()["restarts"] == {player: 1}
    assert len(list(run.events())) > killed_at
    audited(run_dir, f"consume={STEPS}", "close=1")

    scores = lines(run_dir / "evaluations.jsonl")
    metrics = [line for line in lines(run_dir / "metrics.jsonl") if "eval/sums/reward" in line]
    versions = [line["version"] for line in metrics]
    assert versions in ([0, STEPS], [0, 4, STEPS]), "version 4 is skipped if version 0 is still being evaluated"
    assert [line["step"] for line in metrics] == [version - 1 for version in versions]
    assert [(one["version"], one["prompt"]) for one in scores] == [(v, n) for v in versions for n in range(12)]

    for version, line in zip(versions, metrics, strict=True):
        model, config = ("checkpoints/" + str(version), []) if version else ("model", [str(run_dir / "config.toml")])
        alone = tmp_path / f"{version}.jsonl"
        assert main(["eval", str(run_dir / model), *config, "--scores", str(alone), "--json"]) == 0
        (shown,) = [json.loads(printed) for printed in capsys.readouterr().out.splitlines()]
        rewards = [one["rewards"] for one in scores if one["version"] == version]
        assert [one["rewards"] for one in lines(alone)] == rewards, "greedy: exactly this version has played"
        assert shown["metrics"] == {key: value for key, value in line.items() if key in shown["metrics"]}
    assert scores[0]["rewards"] != scores[-12]["rewards"], "another version writes something else"
