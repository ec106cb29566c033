"""Bitwise deltas between two versions of the weights, applied in place by the reader.

- A delta covers one span: bytes of a version, taken as unsigned integers of one width. It contains the places of the
  changed elements (as gaps) and their new values (as bits, or as steps from the old ones).
- Values are neither rounded nor interpreted: NaN payloads, -0.0 and denormals are bits like all others.
- A delta is at most ``HEAD_BYTES`` longer than its span: a span that changed everywhere travels whole.
- Any bytes either apply as a delta or raise ``ProtocolError``, and after an error the target is unchanged. A delta
  applies to wrong base bytes too, so the reader must check the result against the digests of the manifest.
"""

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.manifest import NBYTES
from staleflow.protocols.wire.messages import Manifest

WIDTHS: Final = (1, 2, 4, 8)
"""Allowed widths of an element, in bytes."""

LEVEL: Final = 1
"""Compression level of zstd. Higher levels save 1 % and take ten times as long (bench/delta.py)."""

DENSE: Final = 0.35
"""Share of changed elements above which their places cost more than the zeros between them, once compressed."""

_MAGIC: Final = b"sfd1"
_HEAD: Final = struct.Struct("<4sBBBxQQ")
_SUM: Final = struct.Struct("<I")
_LENGTH: Final = struct.Struct("<I")
HEAD_BYTES: Final = _SUM.size + _HEAD.size + _LENGTH.size
MAX_BYTES: Final = 1 << 31
"""Maximum size of one span: its lengths are 32-bit numbers."""

_FAR: Final = 255
"""Continuation byte: a gap is a sum of bytes that ends with the first byte below this value."""


class Kind(IntEnum):
    """Contents of the streams of a delta."""

    SAME = 0
    """Nothing changed; no stream."""
    SPARSE = 1
    """Gaps, then the changed elements."""
    STEPS = 2
    """Every element's step."""
    WHOLE = 3
    """The new bytes."""


class Span(NamedTuple):
    """Bytes of a version that one delta covers: a multiple of ``width``, aligned to it."""

    offset: int
    nbytes: int
    width: int


class _Head(NamedTuple):
    kind: Kind
    width: int
    packed: bool
    """True: elements are zigzag steps from the old ones, in planes of equal bytes, each stream compressed by zstd."""
    nbytes: int
    """Size of the span."""
    changes: int
    """Number of elements in the streams."""


# Spans ---------------------------------------------------------------------------------------------------------------


def comparable(old: Manifest, new: Manifest) -> bool:
    """Return True if both have the same tensors at the same places, so that equal offsets hold the same weights."""
    return [(e.name, e.dtype, e.shape) for e in old.tensors] == [(e.name, e.dtype, e.shape) for e in new.tensors]


def spans(old: Manifest, new: Manifest, *, most_bytes: int) -> list[Span]:
    """Return the spans in which two comparable versions may differ, in order.

    A span covers adjacent tensors of one width whose digests differ. The padding between tensors belongs to no tensor;
    a span over several tensors includes it.
    """
    runs: list[Span] = []
    for base, entry in zip(old.tensors, new.tensors, strict=True):
        width = NBYTES[entry.dtype]
        if base.digest == entry.digest or not entry.nbytes:
            runs.append(Span(entry.offset, 0, width))  # ends the run
        elif runs and runs[-1].nbytes and runs[-1].width == width:
            runs[-1] = Span(runs[-1].offset, entry.offset + entry.nbytes - runs[-1].offset, width)
        else:
            runs.append(Span(entry.offset, entry.nbytes, width))
    most_bytes -= most_bytes % max(WIDTHS)
    return [
        Span(start, min(most_bytes, run.offset + run.nbytes - start), run.width)
        for run in runs
        for start in range(run.offset, run.offset + run.nbytes, most_bytes)
    ]


# Encode and apply ----------------------------------------------------------------------------------------------------


def encode(old: Data, new: Data, width: int, *, compress: bool = True) -> bytes:
    """Return the delta from ``old`` to ``new``.

    Raises ``ValueError`` unless both have the same size and that is a multiple of ``width``.
    """
    if width not in WIDTHS or len(old) != len(new) or len(new) % width or len(new) > MAX_BYTES:
        raise ValueError(f"no delta of width {width} between {len(old)} and {len(new)} bytes")
    before, after = _elements(old, width), _elements(new, width)
    changed = np.flatnonzero(before != after)
    if not changed.size:
        return _write(Kind.SAME, width, False, len(new), 0, [])
    if compress and changed.size > DENSE * after.size:
        kind, count, streams = Kind.STEPS, after.size, [_squeeze(plane) for plane in _planes(before, after)]
    elif compress:
        planes = _planes(before[changed], after[changed])
        kind, count, streams = Kind.SPARSE, changed.size, [_squeeze(part) for part in (_gaps(changed), *planes)]
    elif changed.size * (1 + width) < len(new):
        kind, count, streams = Kind.SPARSE, changed.size, [_gaps(changed).tobytes(), after[changed].tobytes()]
    else:
        return _write(Kind.WHOLE, width, False, len(new), after.size, [new])
    if sum(len(stream) + _LENGTH.size for stream in streams) > len(new):
        return _write(Kind.WHOLE, width, False, len(new), after.size, [new])
    return _write(kind, width, compress, len(new), count, streams)


def apply(delta: Data, target: memoryview) -> None:
    """Turn ``target``, writable bytes that hold the old span, into the new span, in place.

    Raises ``ProtocolError`` for bytes that ``encode`` cannot have written for a span of this size.
    """
    _expect(len(delta) <= HEAD_BYTES + target.nbytes, f"it has {len(delta)} bytes, more than its span")
    head, body = _read_head(memoryview(delta).cast("B"), target.nbytes)
    if head.kind is Kind.SAME:
        _streams(body, 0)
        return
    if head.kind is Kind.WHOLE:
        (whole,) = _streams(body, 1)
        _expect(len(whole) == target.nbytes, "it is not as long as its span")
        target.cast("B")[:] = whole
        return
    elements = np.frombuffer(target, f"<u{head.width}")
    if head.kind is Kind.STEPS:
        _expect(head.packed and head.changes == elements.size, "it has not one step for each element")
        steps = _unpacked(_streams(body, head.width), head)
        np.add(elements, steps, out=elements)
        return
    gaps, *parts = _streams(body, 1 + (head.width if head.packed else 1))
    where = _places(np.frombuffer(_loosen(gaps, elements.size + 1) if head.packed else gaps, np.uint8), head.changes)
    _expect(int(where[-1]) < elements.size, "a change lies behind its span")
    if head.packed:
        elements[where] += _unpacked(parts, head)
    else:
        _expect(len(parts[0]) == head.changes * head.width, "it has not one value for each change")
        elements[where] = np.frombuffer(parts[0], elements.dtype)


# Places: gaps as bytes -----------------------------------------------------------------------------------------------


def _gaps(changed: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the number of elements to skip before each change; a byte of 255 is continued by the next one."""
    gaps = np.diff(changed, prepend=-1) - 1
    ends = np.cumsum(gaps // _FAR + 1) - 1
    out = np.full(int(ends[-1]) + 1, _FAR, np.uint8)
    out[ends] = gaps % _FAR
    return out


def _places(gaps: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """Invert ``_gaps``: return the ascending places of the changes, at least one."""
    ends = np.flatnonzero(gaps != _FAR)
    _expect(count > 0 and ends.size == count and ends[-1] == gaps.size - 1, "it has not one gap for each change")
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(count)


# Elements: steps as planes of bytes ----------------------------------------------------------------------------------


def _planes(before: NDArray[Any], after: NDArray[Any]) -> list[NDArray[np.uint8]]:
    """Return the zigzag steps from old to new, modulo the width, by planes: lowest bytes, second lowest bytes, ..."""
    steps = after - before
    top = 8 * steps.itemsize - 1
    zigzag = (steps << 1) ^ (0 - (steps >> top))
    return [np.ascontiguousarray(plane) for plane in zigzag.view(np.uint8).reshape(-1, steps.itemsize).T]


def _unpacked(streams: list[memoryview], head: _Head) -> NDArray[Any]:
    """Invert ``_planes``: return the steps."""
    both = np.empty((head.changes, head.width), np.uint8)
    for place, stream in enumerate(streams):
        plane = np.frombuffer(_loosen(stream, head.changes), np.uint8)
        _expect(plane.size == head.changes, "it has not one step for each change")
        both[:, place] = plane
    zigzag = both.reshape(-1).view(f"<u{head.width}")
    return (zigzag >> 1) ^ (0 - (zigzag & 1))


def _elements(data: Data, width: int) -> NDArray[Any]:
    return np.frombuffer(data, f"<u{width}") if len(data) else np.empty(0, f"<u{width}")


# Bytes ---------------------------------------------------------------------------------------------------------------


def _squeeze(stream: NDArray[np.uint8]) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(stream.data)


def _loosen(stream: memoryview, most: int) -> bytes:
    """Decompress a stream to at most ``most`` bytes, whatever size its header declares."""
    # The declared size comes from the peer: check it before zstd allocates that much.
    try:
        _expect(zstandard.frame_content_size(stream) <= most, "a stream of it is longer than its span allows")
        return zstandard.ZstdDecompressor().decompress(stream, max_output_size=most, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _malformed(f"a stream of it is damaged: {error}") from None


def _write(kind: Kind, width: int, packed: bool, nbytes: int, changes: int, streams: Sequence[Data]) -> bytes:
    head = _HEAD.pack(_MAGIC, kind, width, packed, nbytes, changes)
    parts = [head, *(part for stream in streams for part in (_LENGTH.pack(len(stream)), stream))]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join((_SUM.pack(crc), *parts))


def _read_head(delta: memoryview, nbytes: int) -> tuple[_Head, memoryview]:
    _expect(delta.nbytes >= _SUM.size + _HEAD.size, f"it has {delta.nbytes} bytes")
    _expect(_SUM.unpack_from(delta)[0] == zlib.crc32(delta[_SUM.size :]), "its checksum is wrong")
    magic, kind, width, packed, size, changes = _HEAD.unpack_from(delta, _SUM.size)
    _expect(magic == _MAGIC and kind in list(Kind) and width in WIDTHS and packed in (0, 1), "its head is damaged")
    _expect(size == nbytes and not nbytes % width, f"it is of {size} bytes, the span has {nbytes}")
    _expect(changes <= nbytes // width, f"it has {changes} changes, the span {nbytes // width} elements")
    return _Head(Kind(kind), width, bool(packed), size, changes), delta[_SUM.size + _HEAD.size :]


def _streams(body: memoryview, count: int) -> list[memoryview]:
    streams: list[memoryview] = []
    for _ in range(count):
        _expect(body.nbytes >= _LENGTH.size, "a stream is missing")
        (length,) = _LENGTH.unpack_from(body)
        streams.append(body[_LENGTH.size : _LENGTH.size + length])
        _expect(streams[-1].nbytes == length, "a stream is cut off")
        body = body[_LENGTH.size + length :]
    _expect(not body.nbytes, f"{body.nbytes} bytes follow its last stream")
    return streams


def _expect(holds: Any, otherwise: str) -> None:
    if not holds:
        raise _malformed(otherwise)


def _malformed(detail: str) -> ProtocolError:
    return ProtocolError(Code.MALFORMED, f"a delta is not one: {detail}")
