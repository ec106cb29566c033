"""The end of a run, from its files."""

import json
from pathlib import Path
from typing import Any

import pytest

from staleflow.configs.load import load
from staleflow.supervisor import summary
from staleflow.supervisor.summary import Pace, Summary, facts, rewards, summarise

SIMULATED = Path(__file__).parent.parent.parent / "configs" / "simulated.toml"


def seal(batch: int, step: int, *versions: int) -> dict[str, Any]:
    return {"ev": "seal", "batch": batch, "step": step, "members": [{"version": version} for version in versions]}


def consume(batch: int) -> dict[str, Any]:
    return {"ev": "consume", "batch": batch}


def release(why: str) -> dict[str, Any]:
    return {"ev": "release", "why": why}


def test_off_policy_is_of_what_was_trained_not_of_what_was_sealed() -> None:
    assert facts([seal(1, 2, 0, 2), seal(2, 3, 0, 0), consume(1)]).ages == [2, 0]


def test_what_a_drain_gives_back_is_not_lost() -> None:
    events = [release("expired"), release("filtered"), seal(1, 0, 0), consume(1), release("aborted")]
    assert facts(events).lost == {"expired": 1}


def test_held_out_prompts_are_judged_before_training_groups() -> None:
    trained = {"step": 0, "reward/mean": 0.1}
    assert rewards([trained]) == ("training groups", 0.1, 0.1)
    assert rewards([{"reward/eval": 0.2}, trained, {"reward/eval": 0.9}]) == ("held-out prompts", 0.2, 0.9)
    assert rewards([]) == ("training groups", None, None)


def made(run_dir: Path, **changes: Any) -> Summary:
    config = load(SIMULATED)
    given: dict[str, Any] = {
        "outcome": "finished",
        "error": "",
        "status": {"version": 30, "totals": {"tokens_trained": 7, "releases": {"filtered": 2}}},
        "violations": 0,
        "wall_s": 1.0,
        "trained_per_s": 2.0,
        "restarts": {"rollout-0": 1, "trainer": 0},
    }
    return summarise(config, run_dir, **(given | changes))


def test_a_summary_comes_back_as_it_was_written(tmp_path: Path) -> None:
    lines = [{"step": 0, "reward/mean": 0.5, "trainer/bad_steps": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    it = made(tmp_path)
    assert (it.steps, it.steps_wanted, it.tokens_trained, it.groups_filtered, it.failed_steps) == (30, 30, 7, 2, 1)
    assert it.restarts == {"rollout-0": 1}
    summary.write(it, tmp_path)
    assert summary.read(tmp_path) == it
    assert summary.read(tmp_path / "none") is None


def test_nothing_known_is_nothing_claimed(tmp_path: Path) -> None:
    it = made(tmp_path, status={}, violations=None)
    assert (it.steps, it.reward_start, it.off_policy_mean, it.off_policy_max) == (0, None, None, None)


def test_the_pace_counts_from_the_first_weights_to_the_last_step() -> None:
    pace = Pace()
    assert pace.tokens_per_s == 0.0
    seen = [(0.0, -1, 0), (10.0, 0, 100), (12.0, 1, 200), (14.0, 2, 300), (60.0, 2, 300)]
    for now_s, version, tokens in seen:
        pace.see({"version": version, "totals": {"tokens_trained": tokens}}, now_s)
    assert pace.tokens_per_s == 50.0


@pytest.mark.parametrize(
    "change", [{"outcome": "failed"}, {"error": "e"}, {"violations": 1}, {"status": {"error": "e"}}]
)
def test_a_run_with_an_error_or_a_violation_is_not_good(tmp_path: Path, change: dict[str, Any]) -> None:
    assert made(tmp_path).good
    assert not made(tmp_path, **change).good
