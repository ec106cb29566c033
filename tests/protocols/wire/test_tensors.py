"""Arrays arrive unchanged, and no field of a frame is used before its size was checked."""

import hashlib
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import TensorSpec
from staleflow.protocols.wire.tensors import ALIGNMENT, DTYPES, Array, arrays, nbytes_of, pack, specs_and_frames, unpack

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
ARRAYS = st.sampled_from(list(DTYPES.values())).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))
NAMED = st.dictionaries(st.text(max_size=8), ARRAYS, max_size=5)


def same(left: dict[str, Array], right: dict[str, Array]) -> bool:
    """Return True if names, types, shapes and bits are equal (NaN included)."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].tobytes() == right[name].tobytes()
        for name in left
    )


@given(named=NAMED)
def test_arrays_come_back_as_they_were(named: dict[str, Array]) -> None:
    specs, frames = specs_and_frames(named)
    assert same(arrays(specs, [bytes(frame) for frame in frames]), named)
    assert [nbytes_of(spec) for spec in specs] == [frame.nbytes for frame in frames]


@given(named=NAMED)
def test_a_blob_gives_its_arrays_back_and_depends_on_nothing_else(named: dict[str, Array]) -> None:
    blob = pack(named)
    assert same(unpack(blob), named)
    assert pack(dict(reversed(named.items()))) == blob
    assert pack(unpack(blob)) == blob


@given(data=st.binary(max_size=100), named=NAMED)
def test_any_bytes_are_a_blob_or_a_protocol_error(data: bytes, named: dict[str, Array]) -> None:
    blob = pack(named)
    for damaged in (data, blob[: len(data)], blob[:8] + data, blob[: len(data)] + data, blob + b"\0"):
        with suppress(ProtocolError):
            unpack(damaged)


@given(named=NAMED, position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_no_other_bytes_than_those_of_pack_are_a_blob(named: dict[str, Array], position: int, value: int) -> None:
    data = bytearray(pack(named))
    data[position % len(data)] = value
    try:
        found = unpack(bytes(data))
    except ProtocolError:
        return
    assert hashlib.sha256(pack(found)).digest() == hashlib.sha256(data).digest() or list(found) != sorted(found)


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    specs, (frame,) = specs_and_frames({"a": array})
    assert np.shares_memory(np.frombuffer(frame, np.uint8), array)
    data = bytes(frame)
    assert np.shares_memory(arrays(specs, [data])["a"], np.frombuffer(data, np.uint8))


def test_arrays_in_another_order_are_put_in_order() -> None:
    given_arrays: dict[str, Array] = {
        "strided": np.arange(10, dtype=np.int64)[::3],
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "big endian": np.array([1, 2], dtype=">i4"),
    }
    specs, frames = specs_and_frames(given_arrays)
    found = arrays(specs, frames)
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in given_arrays.items()
    }


def test_received_arrays_cannot_be_written() -> None:
    frame = bytearray(8)
    found = arrays([TensorSpec(name="a", dtype="int64", shape=(1,))], [frame])["a"]
    with pytest.raises(ValueError):
        found[0] = 1


def test_each_array_of_a_blob_is_aligned() -> None:
    blob = np.frombuffer(pack({"a": np.ones(3, np.int8), "b": np.ones(2, np.int64)}), np.uint8)
    found = unpack(blob.data)
    for array in found.values():
        assert (array.ctypes.data - blob.ctypes.data) % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", ["float64", "object", "complex64", "U4", "bool"])
def test_other_types_do_not_travel(dtype: str) -> None:
    with pytest.raises(ValueError, match=r"'a' is .*; it must be one of int8, uint8"):
        specs_and_frames({"a": np.zeros(2, dtype=dtype)})


def spec(dtype: str = "int32", shape: tuple[int, ...] = (2, 2)) -> TensorSpec:
    return TensorSpec(name="a", dtype=dtype, shape=shape)


@pytest.mark.parametrize(
    ("specs", "sizes", "message"),
    [
        ([spec()], [], "1 arrays are announced, 0 frames came"),
        ([spec()], [15], r"'a': int32\[2, 2\] takes 16 bytes, 15 came"),
        ([spec()], [17], "takes 16 bytes, 17 came"),
        ([spec(), spec()], [16, 16], "'a' comes twice"),
        ([spec(dtype="object")], [16], "dtype 'object' is not one of"),
        ([spec(shape=(-2, -2))], [16], "shape"),
        ([spec(shape=(2**62, 4))], [0], "takes 73786976294838206464 bytes"),
        ([spec(shape=(1,) * 9)], [4], "at most 8 dimensions"),
        ([spec(shape=(0, 2**63))], [0], r"'a': shape \(0, 9223372036854775808\): Maximum allowed dimension exceeded"),
        ([spec(shape=(2**31, 2**31, 0))], [0], r"'a': shape \(2147483648, 2147483648, 0\): array is too big"),
    ],
)
def test_a_frame_must_be_what_its_spec_says(specs: list[TensorSpec], sizes: list[int], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        arrays(specs, [bytes(size) for size in sizes])


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([spec(shape=(1_000,))], "are not in a blob"),
        ([spec(shape=(0,)), spec(shape=(0,))], "'a' comes twice"),
        ([spec(dtype="object")], "dtype 'object' is not one of"),
        ([spec(shape=(-1,))], "shape"),
        ([spec(shape=(1,) * 9)], "at most 8 dimensions"),
        ([spec(shape=(0, 2**63))], "Maximum allowed dimension exceeded"),
        ([spec(shape=(1,))], "60 bytes follow the last array"),
    ],
)
def test_a_blob_must_be_what_its_specs_say(specs: list[TensorSpec], message: str) -> None:
    described = msgspec.msgpack.encode(specs)
    head = b"sfa1" + len(described).to_bytes(4, "little") + described
    with pytest.raises(ProtocolError, match=message):
        unpack(head + bytes(-len(head) % ALIGNMENT + 64))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (2, 2)])
def test_arrays_of_a_blob_cannot_be_written(shape: tuple[int, ...]) -> None:
    blob = bytearray(pack({"a": np.zeros(shape, np.int32)}))
    assert not unpack(blob)["a"].flags.writeable
