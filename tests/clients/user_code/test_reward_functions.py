"""A reward may have several functions, with weights, and functions that score a group in one call."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from staleflow.clients.user_code.rewards import RewardFailed, RewardRunner, Sample
from staleflow.configs.rewards import components
from staleflow.configs.schema import Reward, RewardFunction

REWARDS = Path(__file__).parent / "rewards.py"


@asynccontextmanager
async def running(*functions: tuple[str, float]) -> AsyncGenerator[RewardRunner]:
    given = [RewardFunction(run=f"{REWARDS}:{name}", weight=weight) for name, weight in functions]
    runner = RewardRunner.of(Reward(functions=given, retries=0))
    try:
        await runner.start()
        yield runner
    finally:
        await runner.close()


def sample(completion: str, finish: str = "stop", **more: Any) -> Sample:
    ids = [ord(letter) for letter in completion]
    facts = {"completion_ids": ids, "completion_tokens": len(ids), "finish_reason": finish}
    return Sample(prompt="1+1=", completion=completion, columns={"answer": "1+1=2"}, facts=facts, **more)


async def test_a_function_with_trls_signature_gets_lists_with_a_value_for_each_sample() -> None:
    async with running(("by_trl", 1.0)) as runner:
        assert await runner.scores([sample("2"), sample("3"), sample("")]) == {
            "by_trl": [1.0, 0.0, 0.0],
            "reward": [1.0, 0.0, 0.0],
        }


async def test_the_reward_is_the_weighted_sum_and_each_part_is_kept_before_its_weight() -> None:
    async with running(("by_trl", 2.0), ("brief", 0.25), ("length", 0.0)) as runner:
        assert await runner.scores([sample("2"), sample("17"), sample("2", "length")]) == {
            "by_trl": [1.0, 0.0, 1.0],
            "brief": [-1.0, -2.0, -10.0],
            "length": [1.0, 2.0, 1.0],
            "reward": [1.75, -0.5, -0.5],
        }
        assert await runner.score_one(sample("2")) == 1.75


async def test_an_async_function_may_take_lists() -> None:
    async with running(("later", 1.0)) as runner:
        assert await runner.score([sample("abc"), sample("a")]) == [3.0, 1.0]


async def test_prompts_of_messages_come_to_lists_as_in_trl() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    async with running(("contents", 1.0)) as runner:
        given = [Sample(prompt="a", completion=text, messages=messages) for text in ("b", "c")]
        assert await runner.score(given) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (
            "too_few",
            r"the reward too_few is a list of 1; it must have 2 numbers, one for each of the completions \(1 try\)",
        ),
        (
            "one_number",
            r"the reward one_number is 1\.0; it must be a list of 2 numbers, one for each of the completions",
        ),
    ],
)
async def test_a_list_of_another_length_fails_the_group(function: str, line: str) -> None:
    async with running((function, 1.0)) as runner:
        with pytest.raises(RewardFailed, match=line):
            await runner.score([Sample(prompt="", completion="a"), Sample(prompt="", completion="b")])


async def test_a_failure_names_the_function() -> None:
    async with running(("by_trl", 1.0), ("columns", 1.0)) as runner:
        with pytest.raises(RewardFailed, match=r"the reward columns raised TypeError: .*weight"):
            await runner.score([sample("2")])


def test_a_function_without_a_name_has_its_own() -> None:
    reward = Reward(functions=[RewardFunction(run="a.b:right"), RewardFunction(run="a.py:f", name="short", weight=-1)])
    assert [(one.key, one.name, one.weight) for one in components(reward)] == [
        ("reward.functions[0].run", "right", 1.0),
        ("reward.functions[1].run", "short", -1.0),
    ]
