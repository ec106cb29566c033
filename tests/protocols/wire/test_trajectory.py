"""A payload decodes to a group, or is rejected with the name of the fault."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.protocols.consistency.ids import GroupId, Lineage, Segment, Version
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.tensors import Array, pack, unpack
from staleflow.protocols.wire.trajectory import Finish, GroupPayload, check_values, shard_of


def columns(**changes: Any) -> dict[str, Array]:
    """Two samples: three tokens by versions 4 and 5, then two by version 5."""
    good: dict[str, Array] = {
        "prompt_ids": np.array([7, 8], np.int32),
        "lengths": np.array([3, 2], np.int32),
        "token_ids": np.array([1, 2, 3, 4, 5], np.int32),
        "logprobs": np.array([-1, -2, 0, -3, -0.5], np.float32),
        "loss_mask": np.array([1, 1, 0, 1, 1], np.uint8),
        "segments": np.array([[0, 0, 4, 1], [0, 0, 5, 2], [1, 0, 5, 2]], np.int64),
        "finish": np.array([Finish.STOP, Finish.LENGTH], np.uint8),
        "stage/reward/reward": np.array([1.0, 0.0], np.float32),
    }
    return good | changes


def test_a_payload_survives_the_way_through_a_store() -> None:
    payload = GroupPayload.from_arrays(unpack(pack(columns())))
    assert {name: array.tolist() for name, array in payload.to_arrays().items()} == {
        name: array.tolist() for name, array in columns().items()
    }
    assert (payload.num_samples, payload.num_tokens) == (2, 5)


def test_segments_are_summed_over_samples() -> None:
    payload = GroupPayload.from_arrays(columns())
    assert payload.segment_summary() == [
        Segment(Lineage(0), Version(4), 1),
        Segment(Lineage(0), Version(5), 3),  # without the token that the policy did not write
    ]
    assert payload.sampled_lengths() == [2, 2]
    assert payload.token_versions().tolist() == [4, 5, 5, 5, 5]


def test_a_later_lineage_may_write_an_earlier_version() -> None:
    segments = np.array([[0, 0, 5, 1], [0, 1, 3, 2], [1, 1, 3, 2]], np.int64)
    payload = GroupPayload.from_arrays(columns(segments=segments))
    assert payload.segment_summary() == [Segment(Lineage(0), Version(5), 1), Segment(Lineage(1), Version(3), 3)]


def test_a_sample_may_be_interrupted_before_its_first_token() -> None:
    payload = GroupPayload.from_arrays(
        columns(
            lengths=np.array([5, 0], np.int32),
            segments=np.array([[0, 0, 4, 5]], np.int64),
            finish=np.array([Finish.STOP, Finish.INTERRUPTED], np.uint8),
        )
    )
    assert payload.token_versions().tolist() == [4] * 5


NAN, INF = np.array([0, 0, np.nan, 0, 0], np.float32), np.array([0, 0, -np.inf, 0, 0], np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": np.array([3, 2], np.int64)}, "lengths is int64 with 1 dimensions; it must be int32 with 1"),
        ({"token_ids": np.ones((5, 1), np.int32)}, "token_ids is int32 with 2 dimensions"),
        ({"logprobs": np.zeros(5, np.float16)}, "logprobs is float16"),
        ({"lengths": np.array([], np.int32)}, "lengths holds 0 values; a group has 1 to 65536 samples"),
        ({"lengths": np.ones(65_537, np.int32)}, "lengths holds 65537 values"),
        ({"lengths": np.array([6, -1], np.int32)}, "lengths holds -1"),
        ({"lengths": np.array([3, 3], np.int32)}, "token_ids holds 5 values; the lengths of 2 samples ask for 6"),
        ({"logprobs": np.zeros(4, np.float32)}, "logprobs holds 4 values"),
        ({"loss_mask": np.ones(6, np.uint8)}, "loss_mask holds 6 values"),
        ({"finish": np.zeros(3, np.uint8)}, "finish holds 3 values"),
        ({"prompt_ids": np.array([-1], np.int32)}, "prompt_ids holds -1"),
        ({"token_ids": np.array([1, 2, 3, 4, -5], np.int32)}, "token_ids holds -5"),
        ({"logprobs": NAN}, "logprobs holds a value that is not finite"),
        ({"logprobs": INF}, "logprobs holds a value that is not finite"),
        ({"logprobs": np.full(5, 0.01, np.float32)}, "a log-probability is at most 0"),
        ({"logprobs": np.full(5, np.inf, np.float32)}, "a log-probability is at most 0"),
        ({"loss_mask": np.full(5, 2, np.uint8)}, "loss_mask holds 2"),
        ({"finish": np.array([0, 3], np.uint8)}, "finish holds 3"),
        ({"segments": np.zeros((3, 3), np.int64)}, "segments has 3 columns"),
        ({"segments": np.ones((65_537, 4), np.int64)}, "segments has 65537 rows; a group has at most 65536"),
        ({"segments": np.zeros((0, 4), np.int64)}, "the segments of sample 0 add up to 0 tokens, it has 3"),
        ({"segments": np.array([[0, 0, 4, 3], [1, 0, 4, 1]])}, "the segments of sample 1 add up to 1 tokens, it has 2"),
        ({"segments": np.array([[0, 0, 4, 3], [2, 0, 4, 2]])}, "segments names a sample that does not exist"),
        ({"segments": np.array([[0, 0, -4, 3], [1, 0, 4, 2]])}, "negative"),
        ({"segments": np.array([[0, 0, 4, 3], [0, 0, 4, 0], [1, 0, 4, 2]])}, "empty segment"),
        ({"segments": np.array([[0, 0, 5, 1], [0, 0, 4, 2], [1, 0, 4, 2]])}, "segments goes back in row 1"),
        ({"segments": np.array([[0, 1, 4, 1], [0, 0, 5, 2], [1, 0, 4, 2]])}, "segments goes back in row 1"),
        ({"segments": np.array([[1, 0, 4, 2], [0, 0, 4, 3]])}, "segments goes back in row 1"),
        ({"segments": np.array([[0, 0, 4, 2**62], [0, 0, 4, 2**62]])}, "the longest sample has 3"),
        ({"extra": np.zeros(2, np.float32)}, "unknown columns: extra"),
        ({"stage/reward": np.zeros(2, np.float32)}, "its name must be stage/<stage>/<column>"),
        (
            {"stage/reward/reward": np.zeros(3, np.float32)},
            r"stage/reward/reward is float32\[3\]; it must be float32\[2\], one value a sample",
        ),
        ({"stage/reward/reward": np.zeros(2, np.int32)}, "stage/reward/reward is int32"),
        ({"stage/reward/reward": np.array([0, np.nan], np.float32)}, "not finite"),
        (
            {"stage/critic/values": np.zeros(2, np.float32)},
            r"values is float32\[2\]; it must be float32\[5\], one value a",
        ),
        ({"stage/critic/values": np.zeros((5, 1), np.float32)}, r"values is float32\[5, 1\]; it must be float32\[5\]"),
        ({"stage/reference/logprobs": np.zeros(5, np.float64)}, r"logprobs is float64\[5\]; it must be float32\[5\]"),
        ({"stage/reference/logprobs": INF}, "stage/reference/logprobs holds a value that is not finite"),
        ({"stage/reference/logprobs": np.full(5, 0.5, np.float32)}, "holds 0.5; a log-probability is at most 0"),
        ({"stage/user/other": np.zeros(5, np.float32)}, r"other is float32\[5\]; it must be float32\[2\], one value a"),
    ],
)
def test_what_is_no_group_is_refused_by_name(changes: dict[str, Array], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        GroupPayload.from_arrays(columns(**changes))


@pytest.mark.parametrize("count", [1, 32, 33, 100])
@pytest.mark.parametrize("place", [0, -1])
def test_values_are_judged_alike_however_many_there_are(count: int, place: int) -> None:
    name = "stage/reference/logprobs"
    values = np.full(count, -1, np.float32)
    check_values(name, values)
    for wrong in (np.nan, np.inf, -np.inf):
        values[place] = wrong
        with pytest.raises(ProtocolError, match=f"^{name} holds a value that is not finite$"):
            check_values(name, values)
    values[place] = 0.5
    with pytest.raises(ProtocolError, match=f"^{name} holds 0.5; a log-probability is at most 0$"):
        check_values(name, values)
    check_values("stage/critic/values", values)


def test_no_values_are_none_that_are_wrong() -> None:
    check_values("stage/reward/reward", np.empty(0, np.float32))


def test_a_missing_column_is_named() -> None:
    arrays = columns()
    del arrays["logprobs"], arrays["finish"]
    with pytest.raises(ProtocolError, match="the payload lacks logprobs, finish"):
        GroupPayload.from_arrays(arrays)


def test_a_payload_that_nobody_would_take_does_not_leave() -> None:
    payload = GroupPayload.from_arrays(columns())
    payload.logprobs = np.ones(5, np.float32)
    with pytest.raises(ProtocolError, match="logprobs"):
        payload.to_arrays()


def test_shards_do_not_change_between_releases() -> None:
    assert [shard_of(GroupId(group), 4) for group in range(10)] == [3, 1, 2, 1, 2, 2, 0, 3, 2, 0]


@given(start=st.integers(0, 2**62), shards=st.integers(1, 8))
def test_shards_get_equal_shares_of_any_run_of_groups(start: int, shards: int) -> None:
    counts = Counter(shard_of(GroupId(start + row), shards) for row in range(4_000))
    assert set(counts) == set(range(shards))
    assert max(counts.values()) < 1.3 * 4_000 / shards
