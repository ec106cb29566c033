"""Estimators of an evaluation set, compared with an enumeration of all subsets of the samples."""

from itertools import combinations
from math import isclose

import pytest

from staleflow.metrics.evaluation import pass_at_k, powers, set_metrics
from staleflow.protocols.wire.messages.evaluation import PromptScores


def scores(*rewards: list[float], failed: int = 0) -> list[PromptScores]:
    return [
        PromptScores(prompt=prompt, rewards=own, lengths=[4] * len(own), failed=failed, truncated=1)
        for prompt, own in enumerate(rewards)
    ]


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(samples: int) -> None:
    for passed in range(samples + 1):
        outcomes = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            subsets = list(combinations(outcomes, k))
            assert isclose(pass_at_k(samples, passed, k), sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_exact_for_large_numbers_of_samples() -> None:
    product = 1.0
    for number in range(1024 - 3 + 1, 1024 + 1):  # Chen et al. 2021: 1 - prod(1 - k / i) for i from n - c + 1 to n
        product *= 1 - 512 / number
    assert isclose(pass_at_k(1024, 3, 512), 1 - product)
    assert pass_at_k(1024, 0, 512) == 0.0
    assert pass_at_k(1024, 600, 512) == 1.0


def test_k_is_a_power_of_two_or_the_number_of_samples() -> None:
    assert [powers(samples) for samples in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


def test_the_metrics_of_a_set() -> None:
    assert set_metrics("aime", scores([1.0, 0.0], [0.5, 0.5]), samples=2, pass_reward=1.0) == {
        "eval/aime/reward": 0.5,
        "eval/aime/length": 4.0,
        "eval/aime/truncated": 0.5,
        "eval/aime/avg@2": 0.25,
        "eval/aime/pass@1": 0.25,
        "eval/aime/pass@2": 0.5,
    }


def test_pass_reward_is_the_lowest_reward_that_passes() -> None:
    values = set_metrics("a", scores([1.0, 0.0], [0.5, 0.5]), samples=2, pass_reward=0.5)
    assert values["eval/a/pass@2"] == 1.0
    assert values["eval/a/avg@2"] == 0.75


def test_samples_without_a_reward_are_counted_and_are_in_no_mean() -> None:
    values = set_metrics("a", scores([1.0], [], failed=1), samples=2, pass_reward=1.0)
    assert values["eval/a/failed"] == 2.0
    assert (values["eval/a/reward"], values["eval/a/avg@2"], values["eval/a/pass@1"]) == (1.0, 1.0, 1.0)
    assert "eval/a/pass@2" not in values, "no prompt has two scored samples"
    assert set_metrics("a", scores([], failed=1), samples=1, pass_reward=1.0) == {"eval/a/failed": 1.0}


def test_other_numbers_are_means_over_samples() -> None:
    one = PromptScores(prompt=0, rewards=[1.0, 0.0], lengths=[1, 1], numbers={"stage/judge/score": [0.5, 1.0]})
    two = PromptScores(prompt=1, rewards=[1.0], lengths=[1], numbers={"environment/turns": [3.0]})
    values = set_metrics("a", [one, two], samples=2, pass_reward=1.0)
    assert values["eval/a/stage/judge/score"] == 0.75
    assert values["eval/a/environment/turns"] == 3.0
