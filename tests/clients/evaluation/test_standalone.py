"""Sets are played with a real engine, reward processes, stages and environments, without a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from staleflow.clients.evaluation.standalone import SetResult, chosen_sets, run, with_checkpoint
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config

HERE = Path(__file__).parent
JUDGES = HERE / "judges.py"
REWARDS = HERE.parent / "user_code" / "rewards.py"
ENVIRONMENT = HERE.parent / "trainer" / "evaluation" / "held_out_environment.py"

Play = Callable[..., SetResult]


@pytest.fixture
def play(model_directory: Path, tmp_path: Path) -> Play:
    """Play a set whose rows end in the given ways, in order."""

    def playing(*then: str, more: dict[str, Any] | None = None, **given: Any) -> SetResult:
        path = tmp_path / "rows.jsonl"
        rows = [{"prompt": f"{number}+1=", "then": what} for number, what in enumerate(then)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        table: dict[str, Any] = {
            "prompts": {"source": "somewhere:prompts"},
            "reward": {"run": f"{REWARDS}:length", "retries": 0},
            "rollout": {"max_new_tokens": 6, "max_inflight": 4},
            "eval": [{"name": "sums", "path": str(path), **given}],
        } | (more or {})
        config = with_checkpoint(msgspec.convert(table, Config), model_directory)
        (result,) = run(config, chosen_sets(config, ()), lambda name, done, total: None)
        return result

    return playing


def test_samples_are_scored_by_the_reward_and_are_the_same_every_time(play: Play) -> None:
    first = play("", "", samples=6, temperature=1.0)
    assert [len(one.rewards) for one in first.scores] == [6, 6]
    assert all(0 < length <= 6 for one in first.scores for length in one.lengths)
    assert len({tuple(one.rewards) for one in first.scores}) == 2, "each sample has draws of its own"
    again = play("", "", samples=6, temperature=1.0, more={"rollout": {"max_new_tokens": 6, "max_inflight": 12}})
    assert first.scores == again.scores, "whatever else is in the batch"


def test_a_set_has_a_length_and_a_number_of_prompts_of_its_own(play: Play) -> None:
    (one,) = play("", "", "", prompts=1, max_new_tokens=2, temperature=1.0, samples=8).scores
    assert max(one.lengths) == 2
    assert 0 < one.truncated == one.lengths.count(2)


def test_a_judge_is_a_stage_of_the_evaluation(play: Play) -> None:
    judge = {"name": "judge", "run": f"{JUDGES}:judge", "makes": ["score", "ids:token"], "retries": 0}
    more = {"reward": {"run": f"{JUDGES}:judged", "needs": ["judge/score"]}, "stage": [judge]}
    result = play("", "unjudged", "", samples=2, temperature=1.0, more=more)
    first, unjudged, last = result.scores
    for one in (first, last):
        assert one.rewards == [10.0 * length for length in one.lengths]
        assert one.numbers["stage/judge/score"] == [float(length) for length in one.lengths]
        assert all(0 <= mean < 20 for mean in one.numbers["stage/judge/ids"])
    assert (unjudged.rewards, unjudged.failed) == ([], 2)
    assert result.metrics()["eval/sums/failed"] == 2.0


def test_components_of_the_reward_are_numbers_of_the_set(play: Play) -> None:
    functions = [{"run": f"{REWARDS}:length", "name": "chars"}, {"run": f"{JUDGES}:two", "weight": 0.5}]
    (one,) = play("", temperature=1.0, more={"reward": {"functions": functions}}).scores
    assert one.rewards[0] == one.numbers["reward/chars"][0] + 1.0
    assert one.numbers["reward/two"] == [2.0]


def test_an_environment_plays_the_samples_and_its_failures_are_counted(play: Play) -> None:
    more = {"environment": {"run": f"{ENVIRONMENT}:Asked", "timeout_s": 30.0}, "reward": {}}
    result = play("tokens", "raise", "sum", samples=2, temperature=1.0, max_new_tokens=5, more=more)
    tokens, raised, sums = result.scores
    assert tokens.rewards == [float(length) for length in tokens.lengths]
    assert (raised.rewards, raised.failed) == ([], 2)
    assert sums.numbers["environment/other"] == [1.0, 1.0]


def test_a_prompt_that_the_model_cannot_read_fails_alone(play: Play, tmp_path: Path) -> None:
    rows = tmp_path / "long.jsonl"
    rows.write_text(json.dumps({"prompt": "1" * 200}) + "\n" + json.dumps({"prompt": "1"}) + "\n")
    refused, read = play("", more={"eval": [{"name": "sums", "path": str(rows)}]}).scores
    assert (refused.rewards, refused.failed) == ([], 1)
    assert len(read.rewards) == 1


def test_held_out_prompts_are_a_set_if_there_is_no_other(play: Play, tmp_path: Path) -> None:
    rows = tmp_path / "held_out.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    more: dict[str, Any] = {"eval": [], "prompts": {"source": "somewhere:prompts", "eval_path": str(rows)}}
    result = play("", more=more)
    assert (result.given.name, result.given.temperature, len(result.scores)) == ("held-out", 1.0, 1)


@pytest.mark.parametrize(
    ("names", "given", "line"),
    [
        (["x"], [{"name": "a", "source": "m:f"}], '--set is "x"; it must be one of a'),
        ([], [], r"eval is .*; the configuration has none: add an \[\[eval\]\] table"),
    ],
)
def test_a_set_that_is_not_there_is_named(names: list[str], given: list[Any], line: str) -> None:
    table = {"prompts": {"source": "somewhere:prompts"}, "reward": {"run": "m:f"}, "eval": given}
    with pytest.raises(ConfigError, match=line):
        chosen_sets(msgspec.convert(table, Config), names)
