"""Columns that stages made of many groups are restored group by group, or rejected with the name of the fault."""

import numpy as np
import pytest

from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.columns import join_columns, split_columns
from staleflow.protocols.wire.messages import MadeColumn
from staleflow.protocols.wire.tensors import Array
from staleflow.protocols.wire.trajectory import GroupPayload

REWARD, LOGPROBS = "stage/reward/reward", "stage/reference/logprobs"


def floats(*values: float) -> Array:
    return np.asarray(values, np.float32)


def plain(made: list[dict[str, Array]]) -> list[dict[str, list[float]]]:
    return [{name: column.tolist() for name, column in group.items()} for group in made]


def test_ragged_columns_of_many_groups_are_one_frame_each() -> None:
    made = [{REWARD: floats(1, 0), LOGPROBS: floats(-1, -2, -3)}, {REWARD: floats(0.5), LOGPROBS: floats()}]
    columns, frames = join_columns(made)
    assert [(column.name, column.counts) for column in columns] == [(REWARD, [2, 1]), (LOGPROBS, [3, 0])]
    assert [frame.nbytes for frame in frames] == [12, 12]
    assert plain(split_columns(columns, frames, 2)) == [{REWARD: [1, 0], LOGPROBS: [-1, -2, -3]}, {REWARD: [0.5]}]


def test_a_column_that_only_some_groups_have_stays_with_them() -> None:
    columns, frames = join_columns([{}, {REWARD: floats(1)}, {}])
    assert plain(split_columns(columns, frames, 3)) == [{}, {REWARD: [1]}, {}]
    assert join_columns([]) == ([], [])


@pytest.mark.parametrize(
    ("columns", "frames", "says"),
    [
        ([MadeColumn(name=REWARD, counts=[1])], [], "1 columns are announced, 0 frames came"),
        ([MadeColumn(name=REWARD, counts=[1])], [bytes(4)], "has 4 bytes for .1. values of 2 groups"),
        ([MadeColumn(name=REWARD, counts=[1, 1])], [bytes(4)], "has 4 bytes for .1, 1. values of 2 groups"),
        ([MadeColumn(name=REWARD, counts=[1, 1])], [floats(1, np.nan).tobytes()], "a value that is not finite"),
        ([MadeColumn(name=REWARD, counts=[1, 1])], [floats(-np.inf, 1).tobytes()], "a value that is not finite"),
        ([MadeColumn(name=REWARD, counts=[1, 1])], [floats(np.inf, 1).tobytes()], "a value that is not finite"),
        ([MadeColumn(name=LOGPROBS, counts=[1, 1])], [floats(0.5, -1).tobytes()], "a log-probability is at most 0"),
    ],
)
def test_what_is_no_column_is_refused_by_name(columns: list[MadeColumn], frames: list[bytes], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        split_columns(columns, frames, 2)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (REWARD, "reward holds 1 values; it must hold 2, one a sample"),
        (LOGPROBS, "logprobs holds 1 values; it must hold 3, one a completion token"),
        ("reward", "its name must be stage/<stage>/<column>"),
    ],
)
def test_a_share_of_another_length_than_its_group_is_refused_and_nothing_taken_in(name: str, says: str) -> None:
    group = GroupPayload(
        prompt_ids=np.zeros(0, np.int32),
        lengths=np.asarray([1, 2], np.int32),
        token_ids=np.zeros(3, np.int32),
        logprobs=floats(0, 0, 0),
        loss_mask=np.ones(3, np.uint8),
        segments=np.asarray([(0, 0, 0, 1), (1, 0, 0, 2)], np.int64),
        finish=np.zeros(2, np.uint8),
    )
    with pytest.raises(ProtocolError, match=says):
        group.add({"stage/user/score": floats(1, 2), name: floats(1)})
    assert group.stages == {}
