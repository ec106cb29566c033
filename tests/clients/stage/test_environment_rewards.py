"""The reward stage scores groups that an environment wrote."""

from pathlib import Path

import numpy as np
import pytest

from staleflow.clients.stage.reward import RewardStage
from staleflow.clients.stage.worker import Failed, StageGroup, StageOutcome
from staleflow.clients.texts import ids_as_text
from staleflow.clients.user_code.rewards import RewardRunner
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.trajectory import GroupPayload

REWARDS = Path(__file__).parents[1] / "user_code" / "rewards.py"


def payload(**returned: list[float]) -> GroupPayload:
    """Two samples: tokens 1 2 3, of which the policy wrote the first and the last, and token 4."""
    return GroupPayload(
        prompt_ids=np.array([9], np.int32),
        lengths=np.array([3, 1], np.int32),
        token_ids=np.array([1, 2, 3, 4], np.int32),
        logprobs=np.array([-1, 0, -1, -1], np.float32),
        loss_mask=np.array([1, 0, 1, 1], np.uint8),
        segments=np.array([[0, 0, 1, 3], [1, 0, 1, 1]], np.int64),
        finish=np.zeros(2, np.uint8),
        stages={f"stage/environment/{name}": np.array(values, np.float32) for name, values in returned.items()},
    )


async def rewards(function: str, group: GroupPayload, **row: float) -> StageOutcome:
    """Return the rewards of one group whose row has these columns beside its prompt."""
    runner = RewardRunner(f"{REWARDS}:{function}", timeout_s=10.0, retries=0, concurrency=1) if function else None
    stage = RewardStage(runner, ids_as_text)
    try:
        (made,) = await stage.make([StageGroup(group=GroupId(1), row={"prompt": "p", **row}, payload=group)])
    finally:
        if runner is not None:
            await runner.close()
    return made


def column(made: StageOutcome) -> list[float]:
    assert not isinstance(made, Failed)
    assert list(made) == ["reward"]
    return list(made["reward"].tolist())


@pytest.mark.parametrize("function", ["", "raises"])
async def test_a_reward_that_the_environment_returned_is_the_reward(function: str) -> None:
    assert column(await rewards(function, payload(reward=[0.5, -1.0], other=[1.0, 2.0]))) == [0.5, -1.0]


async def test_without_one_the_function_scores_the_text_of_all_turns_and_is_told_the_other_numbers() -> None:
    assert column(await rewards("length", payload(other=[1.0, 2.0]))) == [len("1 2 3"), len("4")]
    assert column(await rewards("told", payload(other=[1.0, 2.0]))) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "others", "says"),
    [
        ("answer", {}, '"answer" comes from the prompt\'s row and from environment'),
        ("prompt", {}, '"prompt" comes from the prompt\'s row and from environment'),
        ("completion", {}, '"completion" comes from the sample and from environment'),
        ("score", {"stage/judge/score": [0.0, 1.0]}, '"score" comes from environment and from judge'),
    ],
)
async def test_no_number_takes_the_place_of_another_argument(
    name: str, others: dict[str, list[float]], says: str
) -> None:
    group = payload(**{name: [0.5, 1.0]})
    group.stages.update({column: np.array(values, np.float32) for column, values in others.items()})
    made = await rewards("length", group, answer=4.0)
    assert isinstance(made, Failed)
    assert made.why == f"{says}; the reward takes one value per name"


async def test_without_either_the_group_fails_with_the_reason() -> None:
    made = await rewards("", payload())
    assert isinstance(made, Failed)
    assert made.why == "its environment returned no reward, and reward.run is not set"
