"""Deltas restore versions bit by bit, are never larger than the version itself, and are rejected when damaged."""

import hashlib
import struct
import zlib

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.delta import HEAD_BYTES, WIDTHS, Kind, Span, apply, comparable, encode, spans
from staleflow.protocols.wire.manifest import NBYTES, lay_out
from staleflow.protocols.wire.messages import Manifest

KIND = 8
"""Offset of the byte of a delta that gives its kind."""


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """Draw old and new bytes of one width: equal, changed in places, slightly changed everywhere, or unrelated."""
    width = draw(st.sampled_from(WIDTHS))
    seed, size = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 3_000))
    random = np.random.default_rng(seed)
    old = np.frombuffer(random.bytes(size * width), f"<u{width}") if size else np.empty(0, f"<u{width}")
    new = old.copy()
    match draw(st.sampled_from(["equal", "sparse", "steps", "other"])):
        case "sparse" if size:
            where = random.integers(0, size, draw(st.integers(1, 20)))
            new[where] = np.frombuffer(random.bytes(where.size * width), new.dtype)
        case "steps":
            new += random.integers(0, 3, size).astype(new.dtype) - new.dtype.type(1)
        case "other":
            new = np.frombuffer(random.bytes(size * width), new.dtype) if size else new
        case _:
            pass
    return old.tobytes(), new.tobytes(), width


def applied(delta: bytes, old: bytes) -> bytes:
    target = bytearray(old)
    apply(delta, memoryview(target))
    return bytes(target)


@given(pairs(), st.booleans())
def test_a_delta_gives_back_the_new_bits_and_is_never_larger_than_they_are(
    pair: tuple[bytes, bytes, int], compress: bool
) -> None:
    old, new, width = pair
    delta = encode(old, new, width, compress=compress)
    assert applied(delta, old) == new
    assert len(delta) <= len(new) + HEAD_BYTES


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=64), st.booleans())
def test_any_bits_of_bfloat16_may_become_any_others(bits: list[int], compress: bool) -> None:
    new = np.array(bits, "<u2")
    for old in (new[::-1].copy(), new ^ np.uint16(0x8000), np.full_like(new, 0x7FC1)):  # including -0.0 and NaNs
        delta = encode(old.tobytes(), new.tobytes(), 2, compress=compress)
        assert applied(delta, old.tobytes()) == new.tobytes()


@pytest.mark.parametrize("place", [0, 1, 254, 255, 256, 509, 510, 511, 99_999])
@pytest.mark.parametrize("compress", [False, True])
def test_a_change_is_found_again_however_far_it_is(place: int, compress: bool) -> None:
    old = np.zeros(100_000, "<u2")
    new = old.copy()
    new[[place, 99_999]] = 7, 0x8000
    delta = encode(old.tobytes(), new.tobytes(), 2, compress=compress)
    assert (delta[KIND], applied(delta, old.tobytes())) == (Kind.SPARSE, new.tobytes())
    assert len(delta) < 600


def test_what_changed_decides_how_it_travels() -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 2**16, 4_096, np.uint16)
    few, steps, other = old.copy(), old + np.uint16(1), random.integers(0, 2**16, 4_096, np.uint16)
    few[::100] += 1

    def kind(new: np.ndarray, compress: bool) -> int:
        return encode(old.tobytes(), new.tobytes(), 2, compress=compress)[KIND]

    assert [kind(new, True) for new in (old, few, steps, other)] == [0, 1, 2, 3]
    assert [kind(new, False) for new in (old, few, steps, other)] == [0, 1, 3, 3]


@given(pairs(), st.booleans(), st.data())
def test_a_damaged_delta_is_refused_and_changes_nothing(
    pair: tuple[bytes, bytes, int], compress: bool, data: st.DataObject
) -> None:
    old, new, width = pair
    delta = bytearray(encode(old, new, width, compress=compress))
    if data.draw(st.booleans()):
        del delta[data.draw(st.integers(0, len(delta) - 1)) :]
    else:
        delta[data.draw(st.integers(0, len(delta) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    target = bytearray(old)
    with pytest.raises(ProtocolError, match="a delta is not one"):
        apply(delta, memoryview(target))
    assert target == old


@given(st.binary(max_size=200))
def test_any_bytes_are_a_delta_or_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="a delta is not one"):
        apply(data, memoryview(bytearray(64)))


def test_a_stream_never_becomes_more_than_its_span_allows() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    nbytes = 4 * len(bomb)
    head = struct.pack("<4sBBBxQQ", b"sfd1", Kind.SPARSE, 1, 1, nbytes, 1)
    body = head + b"".join(struct.pack("<I", len(bomb)) + bomb for _ in range(2))
    with pytest.raises(ProtocolError, match="longer than its span allows"):
        apply(struct.pack("<I", zlib.crc32(body)) + body, memoryview(bytearray(nbytes)))


def test_a_delta_is_never_larger_than_its_span_and_what_it_says_of_itself() -> None:
    with pytest.raises(ProtocolError, match="it has 1000 bytes, more than its span"):
        apply(bytes(1000), memoryview(bytearray(64)))


def test_a_delta_fits_its_span_only() -> None:
    old, new = bytes(64), bytes(range(64))
    with pytest.raises(ProtocolError, match="it is of 64 bytes, the span has 128"):
        apply(encode(old, new, 2), memoryview(bytearray(128)))
    with pytest.raises(ValueError, match="no delta of width 3 between 64 and 64 bytes"):
        encode(old, new, 3)
    with pytest.raises(ValueError, match="no delta of width 2 between 64 and 62 bytes"):
        encode(old, new[:62], 2)


def manifest(*tensors: tuple[str, str, tuple[int, ...], str]) -> Manifest:
    return lay_out(
        (name, dtype, shape, hashlib.sha256(salt.encode()).hexdigest()) for name, dtype, shape, salt in tensors
    )


def test_spans_cover_what_may_differ_and_nothing_else() -> None:
    old = manifest(("a", "bfloat16", (3,), "0"), ("b", "bfloat16", (5, 7), "0"), ("c", "float32", (2,), "0"))
    new = manifest(("a", "bfloat16", (3,), "1"), ("b", "bfloat16", (5, 7), "1"), ("c", "float32", (2,), "1"))
    frozen = manifest(("a", "bfloat16", (3,), "0"), ("b", "bfloat16", (5, 7), "0"), ("c", "float32", (2,), "1"))
    assert spans(old, new, most_bytes=1 << 20) == [Span(0, 134, 2), Span(192, 8, 4)]
    assert spans(old, new, most_bytes=100) == [Span(0, 96, 2), Span(96, 38, 2), Span(192, 8, 4)]
    assert spans(old, frozen, most_bytes=1 << 20) == [Span(192, 8, 4)]
    assert spans(old, old, most_bytes=1 << 20) == []


@given(st.lists(st.tuples(st.sampled_from(sorted(NBYTES)), st.integers(0, 90), st.booleans()), min_size=1, max_size=12))
def test_every_byte_of_a_changed_tensor_is_in_exactly_one_span(tensors: list[tuple[str, int, bool]]) -> None:
    old = manifest(*((str(at), dtype, (size,), "0") for at, (dtype, size, _) in enumerate(tensors)))
    new = manifest(*((str(at), dtype, (size,), str(int(other))) for at, (dtype, size, other) in enumerate(tensors)))
    found = spans(old, new, most_bytes=64)
    covered = [byte for span in found for byte in range(span.offset, span.offset + span.nbytes)]
    assert len(covered) == len(set(covered))
    for was, entry in zip(old.tensors, new.tensors, strict=True):
        inside = set(range(entry.offset, entry.offset + entry.nbytes))
        assert inside <= set(covered) if was.digest != entry.digest else not inside & set(covered)
    assert all(span.nbytes % span.width == 0 and span.offset % span.width == 0 for span in found)


def test_versions_of_other_tensors_are_not_comparable() -> None:
    one = manifest(("a", "float32", (4,), "0"))
    assert comparable(one, manifest(("a", "float32", (4,), "1")))
    assert not comparable(one, manifest(("a", "float32", (2, 2), "0")))
    assert not comparable(one, manifest(("a", "int32", (4,), "0")))
    assert not comparable(one, manifest(("b", "float32", (4,), "0")))
    assert not comparable(one, manifest(("a", "float32", (4,), "0"), ("b", "float32", (4,), "0")))
