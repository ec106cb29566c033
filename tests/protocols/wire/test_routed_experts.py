"""The column of router replay has the shape that the worker's model gives it, and that of the trained model."""

from typing import Any

import numpy as np
import pytest

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import ModelLimits
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.routed_experts import COLUMN, dtype_of
from staleflow.protocols.wire.tensors import Array, pack, unpack
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.protocols.wire.typed_columns import TypedColumn, encode_columns

KEY = "token/routed_experts"
SMALL = PayloadLimits(columns=(COLUMN,), model=ModelLimits(moe_layers=3, experts_per_token=2, experts=256))


def group(experts: Array | None) -> GroupPayload:
    """Two samples of two tokens."""
    return GroupPayload(
        prompt_ids=np.zeros(3, np.int32),
        lengths=np.array([2, 2], np.int32),
        token_ids=np.zeros(4, np.int32),
        logprobs=np.zeros(4, np.float32),
        loss_mask=np.ones(4, np.uint8),
        segments=np.array([[0, 0, 0, 2], [1, 0, 0, 2]], np.int64),
        finish=np.zeros(2, np.uint8),
        columns={} if experts is None else {KEY: experts},
    )


@pytest.mark.parametrize("experts", [256, 257])
def test_records_of_any_model_arrive_bit_by_bit(experts: int) -> None:
    dtype = dtype_of(experts)
    assert dtype == {256: "uint8", 257: "uint16"}[experts]
    first, second = (np.arange(experts - 12 - n, experts - n).reshape(2, 3, 2).astype(dtype) for n in range(2))
    arrays = encode_columns([COLUMN], [{"routed_experts": first}, {"routed_experts": second}], [2, 2])
    received = GroupPayload.from_arrays(unpack(pack((group(None)).to_arrays() | arrays)))
    model = ModelLimits(moe_layers=3, experts_per_token=2, experts=experts)
    PayloadLimits(columns=(COLUMN,), model=model).check(received)
    ours, theirs = COLUMN.split(received.columns, [2, 2])
    assert ours.dtype == dtype
    assert np.array_equal(ours, first)
    assert np.array_equal(theirs, second)


def test_samples_without_tokens_yet_take_the_shape_of_the_others() -> None:
    begun = np.ones((2, 3, 2), np.uint16)
    arrays = encode_columns([COLUMN], [{}, {"routed_experts": begun}, {}], [0, 2, 0], fill=True)
    assert np.array_equal(arrays[KEY], begun)
    nothing = encode_columns([COLUMN], [{}, {}], [0, 0], fill=True)
    assert nothing[KEY].shape == (0, 0, 0)
    COLUMN.check(nothing, 2, 0)


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        (None, r"a push lacks the column routed_experts; it must have token/routed_experts uint8 or uint16[*, *]"),
        (np.zeros((4, 6), np.uint8), "column routed_experts is uint8[4, 6]; it must be uint8 or uint16[*, *]"),
        (np.zeros((4, 3, 2), np.int64), "column routed_experts is int64[4, 3, 2]; it must be uint8 or uint16[*, *]"),
        (np.zeros((4, 300, 300), np.uint8), "one value a completion token of at most 65536 bytes"),
        (np.zeros((3, 3, 2), np.uint8), "column routed_experts must be uint8[4, 3, 2], one value a completion token"),
        (np.zeros((4, 2, 2), np.uint8), "is uint8[4, 2, 2]; it must be uint8[tokens, 3, 2]"),
        (np.zeros((4, 3, 2), np.uint16), "is uint16[4, 3, 2]; it must be uint8[tokens, 3, 2]"),
    ],
)
def test_records_that_the_trained_model_cannot_replay_are_refused(experts: Any, says: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        SMALL.check(group(experts))
    assert refused.value.code is Code.MALFORMED
    assert says in str(refused.value)


def test_an_expert_that_the_trained_model_does_not_have_is_refused() -> None:
    model = ModelLimits(moe_layers=3, experts_per_token=2, experts=8)
    PayloadLimits(columns=(COLUMN,), model=model).check(group(np.full((4, 3, 2), 7, np.uint8)))
    with pytest.raises(ProtocolError, match="holds 8; the trained model has 8 experts in a layer, from 0"):
        PayloadLimits(columns=(COLUMN,), model=model).check_tokens(group(np.full((4, 3, 2), 8, np.uint8)))
    unknown = PayloadLimits(columns=(COLUMN,))
    unknown.check(group(np.full((4, 5, 1), 8, np.uint8)))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([[[0, 1]], [[1, 0]]], "it must be an array uint8 or uint16[*, *], one value a token, got list"),
        (np.zeros((2, 6), np.uint8), "it must be an array uint8 or uint16[*, *], one value a token, got uint8[2, 6]"),
    ],
)
def test_a_wrong_record_of_a_sample_is_refused_with_its_type(given: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        encode_columns([COLUMN], [{"routed_experts": given}], [2])
    assert says in str(refused.value)
    fixed = TypedColumn(name="fixed", per="token", dtype="uint8", shape=(1, 2))
    assert fixed.value([[[0, 1]], [[1, 0]]], 2).shape == (2, 1, 2)
