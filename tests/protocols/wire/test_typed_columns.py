"""Typed columns survive their way into a payload and back bit by bit, and others are refused by name."""

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.tensors import DTYPES, Array, pack, unpack
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.protocols.wire.typed_columns import TypedColumn, encode_columns

EXPERTS = TypedColumn(name="experts", per="token", dtype="int32", shape=(2, 3))
TEACHER = TypedColumn(name="teacher_logp", per="token", dtype="float32", required=False)
IMAGE = TypedColumn(name="image", per="sample", dtype="bytes", max_bytes=8)
SCORE = TypedColumn(name="score", per="sample", dtype="int64", shape=(2,))
DECLARED = (EXPERTS, TEACHER, IMAGE, SCORE)
LENGTHS = [2, 0, 3]

KINDS: list[Any] = ["uint16", *(name for name in DTYPES if name != "bfloat16")]


@st.composite
def columns(draw: st.DrawFn) -> TypedColumn:
    per: Literal["token", "sample"] = draw(st.sampled_from(("token", "sample")))
    if per == "sample" and draw(st.booleans()):
        return TypedColumn(name="any", per=per, dtype="bytes")
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    return TypedColumn(name="any", per=per, dtype=draw(st.sampled_from(KINDS)), shape=shape)


@given(columns(), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.data())
def test_any_column_is_the_same_after_its_way_through_a_payload(
    column: TypedColumn, lengths: list[int], data: st.DataObject
) -> None:
    values: list[Any] = []
    for tokens in lengths:
        count = tokens if column.per == "token" else 1
        raw = data.draw(st.binary(max_size=20) if column.is_bytes else st.binary(min_size=count * column.value_bytes))
        if column.is_bytes:
            values.append(raw)
            continue
        array, shape = np.frombuffer(raw[: count * column.value_bytes], column.array_dtype), column.shape or ()
        values.append(array.reshape((tokens, *shape) if column.per == "token" else shape))
    sent = group(lengths, encode_columns([column], [{"any": value} for value in values], lengths))
    received = GroupPayload.from_arrays(unpack(pack(sent.to_arrays())))
    PayloadLimits(columns=(column,)).check(received)
    for before, after in zip(values, column.split(received.columns, lengths), strict=True):
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()
        assert column.is_bytes or (before.shape == after.shape and before.dtype == after.dtype)


def test_lists_are_converted_and_samples_without_tokens_need_no_token_column() -> None:
    experts = [[[1, 2, 3], [4, 5, 6]]]
    given_columns: list[dict[str, Any]] = [
        {"experts": experts * 2, "image": b"ab", "score": [1, 2]},
        {"image": bytearray(), "score": np.array([3, 4])},
        {"experts": experts * 3, "image": memoryview(b"c"), "score": (5, 6)},
    ]
    arrays = encode_columns(DECLARED, given_columns, LENGTHS)
    assert set(arrays) == {"token/experts", "sample/image", "sample/image:sizes", "sample/score"}
    assert arrays["token/experts"].shape == (5, 2, 3)
    assert bytes(arrays["sample/image"]) == b"abc"
    assert arrays["sample/image:sizes"].tolist() == [2, 0, 1]
    assert arrays["sample/score"].tolist() == [[1, 2], [3, 4], [5, 6]]


def test_values_that_are_not_there_yet_are_filled() -> None:
    arrays = encode_columns(DECLARED, [{"teacher_logp": [0.5, 1]}, {}, {"image": b"x"}], LENGTHS, fill=True)
    assert arrays["token/teacher_logp"].tolist() == [0.5, 1, 0, 0, 0]
    assert arrays["sample/image:sizes"].tolist() == [0, 0, 1]
    PayloadLimits(columns=DECLARED).check(group(LENGTHS, arrays))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"expert": [1]}, "sample 0: the run has no column 'expert'; it has experts, teacher_logp, image, score"),
    ({"experts": None}, r"sample 0: column experts: it must be int32\[2, 2, 3\], one value a token: got a list of obj"),
    ({"experts": np.zeros((3, 2, 3), np.int32)}, r"int32\[2, 2, 3\], one value a token, got int32\[3, 2, 3\]"),
    ({"experts": np.zeros((2, 2, 3), np.int64)}, r"got int64\[2, 2, 3\]"),
    ({"experts": [[[1, 2, 1 << 40]] * 2] * 2}, "got a number that int32 cannot hold"),
    ({"experts": [[[1, 2, 0.5]] * 2] * 2}, "got a list of float64"),
    ({"experts": [[1], [1, 2]]}, "sample 0: column experts: it must be int32"),
    ({"image": "text"}, "sample 0: column image: it must be bytes, got str"),
    ({"image": bytes(9)}, r"it must have at most 8 bytes \(max_bytes\), got 9"),
    ({"score": [1, 2, 3]}, r"column score: it must be int64\[2\], got int64\[3\]"),
    ({"teacher_logp": [0.0, 0.0]}, r"sample 2 lacks the column teacher_logp \(float32, one a token\)"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_a_wrong_value_of_a_sample_is_refused_with_sample_and_column(wrong: dict[str, Any], says: str) -> None:
    good = [
        {"experts": np.zeros((tokens, 2, 3), np.int32), "image": b"", "score": np.zeros(2, np.int64)}
        for tokens in LENGTHS
    ]
    encode_columns(DECLARED, good, LENGTHS)
    with pytest.raises(ValueError, match=says):
        encode_columns(DECLARED, [good[0] | wrong, *good[1:]], LENGTHS)


PUSHED: list[tuple[str, Array | None, Code, str]] = [
    (
        "token/experts",
        None,
        Code.MALFORMED,
        r"a push lacks the column experts; it must have token/experts int32\[2, 3\]",
    ),
    ("sample/image", None, Code.MALFORMED, "a push lacks the column image; it must have sample/image bytes"),
    ("sample/image:sizes", None, Code.MALFORMED, r"sample/image:sizes must be int64\[3\], got none"),
    ("sample/image:sizes", np.array([1, 1, 1]), Code.MALFORMED, r"image must be uint8\[3\] .*, got uint8\[0\]"),
    (
        "sample/image:sizes",
        np.array([9, 0, 0]),
        Code.OVERSIZE,
        "column image has a byte string of 9 bytes; .* at most 8",
    ),
    ("sample/image:sizes", np.array([-1, 1, 0]), Code.MALFORMED, "with sizes of at least 0"),
    ("token/experts", np.zeros((3, 2, 3), np.int32), Code.MALFORMED, r"int32\[5, 2, 3\], one value a completion token"),
    ("token/experts", np.zeros((5, 6), np.int32), Code.MALFORMED, r"got int32\[5, 6\]"),
    ("token/experts", np.zeros((5, 2, 3), np.float32), Code.MALFORMED, r"got float32\[5, 2, 3\]"),
    ("sample/score", np.zeros((2, 2), np.int64), Code.MALFORMED, r"score must be int64\[3, 2\], one value a sample"),
    (
        "sample/experts",
        np.zeros(3, np.int32),
        Code.MALFORMED,
        "a push has the column 'sample/experts'; the run declares",
    ),
    ("token/experts:sizes", np.zeros(3, np.int64), Code.MALFORMED, "a push has the column 'token/experts:sizes'"),
]


@pytest.mark.parametrize(("name", "array", "code", "says"), PUSHED)
def test_a_payload_with_other_columns_than_declared_is_refused(
    name: str, array: Array | None, code: Code, says: str
) -> None:
    nothing: list[dict[str, Any]] = [{}] * 3
    arrays = encode_columns(DECLARED, nothing, LENGTHS, fill=True)
    PayloadLimits(columns=DECLARED).check(group(LENGTHS, arrays))
    arrays.pop(name, None)
    if array is not None:
        arrays[name] = array
    with pytest.raises(ProtocolError, match=says) as refused:
        PayloadLimits(columns=DECLARED).check(group(LENGTHS, arrays))
    assert refused.value.code is code


def test_a_run_without_columns_refuses_every_column() -> None:
    with pytest.raises(ProtocolError, match=r"the run declares none, as it has no \[\[column\]\]"):
        PayloadLimits().check(group([1], {"token/any": np.zeros(1, np.int32)}))


def group(lengths: list[int], typed: dict[str, Array]) -> GroupPayload:
    total = sum(lengths)
    return GroupPayload(
        prompt_ids=np.zeros(1, np.int32),
        lengths=np.array(lengths, np.int32),
        token_ids=np.zeros(total, np.int32),
        logprobs=np.zeros(total, np.float32),
        loss_mask=np.ones(total, np.uint8),
        segments=np.array([(s, 0, 0, n) for s, n in enumerate(lengths) if n], np.int64).reshape(-1, 4),
        finish=np.zeros(len(lengths), np.uint8),
        columns=typed,
    )
