"""A user-defined stage runs in its own process: its inputs and outputs are checked, and a faulty stage fails by
name."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.stage.user_stage import UserStage, user_stage
from staleflow.clients.stage.worker import Failed, StageOutcome
from staleflow.clients.texts import ids_as_text
from staleflow.clients.user_code.group import Group, WrongColumns, checked_columns
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Stage
from staleflow.configs.stages import Node
from tests.clients.stage.judged import group

USERS = Path(__file__).parents[1] / "user_code" / "users.py"


@asynccontextmanager
async def running(function: str, makes: tuple[str, ...] = ("score",), **settings: Any) -> AsyncGenerator[UserStage]:
    own: dict[str, Any] = {"timeout_s": 60.0, "retries": 0} | settings
    given = Stage(name="judge", run=f"{USERS}:{function}", makes=list(makes), **own)
    full = tuple(f"stage/judge/{name}" for name in makes)
    node = Node(name="judge", key="stage[0].needs", needs=("stage/reward/reward",), makes=full)
    async with user_stage(given, node, ids_as_text) as stage:
        yield stage


def columns(made: StageOutcome) -> dict[str, np.ndarray]:
    assert not isinstance(made, Failed), made.why
    return made


def why(made: StageOutcome) -> str:
    assert isinstance(made, Failed)
    return made.why


async def test_a_stage_gets_a_whole_group_and_what_it_needs_and_makes_both_kinds_of_columns() -> None:
    one = group(3, lengths=(2, 3))
    one.payload.stages["stage/reward/reward"] = np.array([10.0, 20.0], np.float32)
    async with running("both", ("score", "values:token"), options={"weight": 0.5}) as stage:
        (made,) = await stage.make([one])
    texts = ids_as_text(np.split(one.payload.token_ids, [2]))
    found = columns(made)
    assert found["stage/judge/score"].tolist() == [0.5 * len(texts[0]) + 10, 0.5 * len(texts[1]) + 20]
    expected = one.payload.logprobs * (one.payload.loss_mask != 0)
    np.testing.assert_array_equal(found["stage/judge/values:token"], expected.astype(np.float32))
    assert {column.dtype for column in found.values()} == {np.dtype(np.float32)}


async def test_groups_of_an_async_stage_are_under_way_side_by_side() -> None:
    async with running("slowly", options={"seconds": 3.0}) as stage, asyncio.timeout(60.0):  # one by one take 90 s
        made = await stage.make([group(number) for number in range(30)])
    assert [columns(one)["stage/judge/score"].tolist() for one in made] == [[0.0, 0.0]] * 30


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"score": [1.0]}, "score has 1 values; the group has 2 samples"),
        ({"score": [[1.0, 2.0]]}, r"score has shape \[1, 2\]; the group has 2 samples"),
        ({"score": [1.0, "good"]}, "score is .*; it must hold numbers"),
        ({"score": [1.0, 1e39]}, "score holds a value that is not finite in float32"),
        ({}, "it returned no score"),
        ({"score": [1, 2], "other": [1, 2]}, "it returned other; it declares score"),
        ([1.0, 2.0], "it returned list; it must be a dict of score"),
    ],
)
def test_what_is_not_one_value_a_sample_is_named(what: Any, says: str) -> None:
    with pytest.raises(WrongColumns, match=f"^{says}$"):
        checked_columns(Group.of({}, ["", ""], group(3).payload), ["stage/judge/score"], what)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ([[1.0] * 4], "values has 1 entries; the group has 2 samples, each with one value per token"),
        ([[1.0] * 4, [1.0] * 5], "values of sample 1 has 5 values; it has 6 completion tokens"),
        (3.0, "values has float; the group has 2 samples, each with one value per token"),
    ],
)
def test_ragged_columns_that_do_not_fit_the_tokens_are_named(what: Any, says: str) -> None:
    with pytest.raises(WrongColumns, match=f"^{says}$"):
        checked_columns(Group.of({}, ["", ""], group(3).payload), ["stage/judge/values:token"], {"values": what})


async def test_a_call_that_returned_what_it_must_not_fails_its_group_with_the_reason() -> None:
    async with running("returns", options={"what": {"score": [1.0]}}) as stage:
        (made,) = await stage.make([group(3)])
    assert why(made) == "the stage judge: score has 1 values; the group has 2 samples (1 try)"


async def test_a_call_that_gave_too_little_or_hung_is_tried_again(tmp_path: Path) -> None:
    marker = str(tmp_path / "marker")
    async with running("too_few_at_first", options={"marker": marker}, retries=1) as stage:
        (made,) = await stage.make([group(3)])
    assert columns(made)["stage/judge/score"].tolist() == [0.0, 0.0]
    async with running("hangs", timeout_s=0.3, retries=1) as stage:
        (made,) = await stage.make([group(3)])
    assert why(made) == "the stage judge took longer than 0.3 s (2 tries)"


async def test_a_function_that_is_not_there_is_named_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"^stage judge is .*users.py:missing.*has no missing"):
        async with running("missing"):
            pass
