"""Arrays as raw little-endian frames, each described by a spec in the header that is checked before use.

``specs_and_frames`` and ``arrays`` copy nothing. ``pack`` and ``unpack`` use one blob instead, for stores: equal arrays
give equal bytes in any order, so a blob can be identified by its digest.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.messages import TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "int8": np.dtype("<i1"),
    "uint8": np.dtype("<u1"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
"""Every dtype that may travel. NumPy has no bfloat16: its bits travel as unsigned 16-bit integers."""

MAX_DIMENSIONS: Final = 8
ALIGNMENT: Final = 64
"""Each array of a blob starts at a multiple of this many bytes."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_HEAD: Final = struct.Struct("<4sI")
_MAGIC: Final = b"sfa1"
_PADDING: Final = [bytes(size) for size in range(ALIGNMENT)]
_NO_BYTES: Final = memoryview(b"")
_specs_decoder: Final = msgspec.msgpack.Decoder(list[TensorSpec])
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError, TypeError)


def nbytes_of(spec: TensorSpec) -> int:
    """Return the exact size of a frame in bytes. Raises ``ProtocolError`` for a spec that describes no array."""
    if (dtype := DTYPES.get(spec.dtype)) is None:
        raise _malformed(f"array {spec.name!r}: dtype {spec.dtype!r} is not one of {', '.join(DTYPES)}")
    if len(spec.shape) > MAX_DIMENSIONS or (spec.shape and min(spec.shape) < 0):
        raise _malformed(f"array {spec.name!r}: shape {spec.shape} is none of at most {MAX_DIMENSIONS} dimensions")
    return math.prod(spec.shape) * dtype.itemsize


def specs_and_frames(named: Mapping[str, Array]) -> tuple[list[TensorSpec], list[memoryview]]:
    """Return specs and frames in the order of the mapping.

    Frames are in C order and little endian; arrays that already are both are not copied. Raises ``ValueError`` for a
    dtype that may not travel.
    """
    specs: list[TensorSpec] = []
    frames: list[memoryview] = []
    for name, given in named.items():
        array = given
        if (dtype := _NAMES.get(given.dtype)) is None or not given.flags.c_contiguous:
            little = given.dtype.newbyteorder("<")
            if (dtype := _NAMES.get(little)) is None:
                raise ValueError(f"array {name!r} is {given.dtype}; it must be one of {', '.join(DTYPES)}")
            array = np.ascontiguousarray(given, dtype=little)
        specs.append(TensorSpec(name=name, dtype=dtype, shape=given.shape))
        frames.append(array.data.cast("B") if array.size else _NO_BYTES)
    return specs, frames


def arrays(specs: Sequence[TensorSpec], frames: Sequence[Data]) -> dict[str, Array]:
    """Return read-only views of the frames, by name. Raises ``ProtocolError`` unless each frame matches its spec."""
    if len(specs) != len(frames):
        raise _malformed(f"{len(specs)} arrays are announced, {len(frames)} frames came")
    views: dict[str, Array] = {}
    for spec, frame in zip(specs, frames, strict=True):
        view = memoryview(frame).toreadonly()
        if (wanted := nbytes_of(spec)) != (size := view.nbytes):
            raise _malformed(f"array {spec.name!r}: {spec.dtype}{list(spec.shape)} takes {wanted} bytes, {size} came")
        if spec.name in views:
            raise _malformed(f"array {spec.name!r} comes twice")
        views[spec.name] = _view(spec, view)
    return views


def pack(named: Mapping[str, Array]) -> bytes:
    """Return one blob of all arrays, sorted by name. The same arrays always give the same bytes."""
    return b"".join(pieces(named))


def pieces(named: Mapping[str, Array]) -> list[bytes | memoryview]:
    """Return the blob of ``pack`` as consecutive parts, without copying the arrays."""
    specs, frames = specs_and_frames({name: named[name] for name in sorted(named)})
    described = msgspec.msgpack.encode(specs)
    parts: list[bytes | memoryview] = [_HEAD.pack(_MAGIC, len(described)), described]
    offset = _HEAD.size + len(described)
    for frame in frames:
        padding = -offset % ALIGNMENT
        parts += (_PADDING[padding], frame)
        offset += padding + frame.nbytes
    return parts


def unpack(data: Data) -> dict[str, Array]:
    """Return read-only views into a blob. Raises ``ProtocolError`` for bytes that ``pack`` cannot have written."""
    view = memoryview(data).cast("B").toreadonly()
    if view.nbytes < _HEAD.size:
        raise _malformed(f"a blob of {view.nbytes} bytes has no head")
    magic, length = _HEAD.unpack_from(view)
    if magic != _MAGIC or _HEAD.size + length > view.nbytes:
        raise _malformed("the head of the blob is damaged")
    specs = _read_specs(view[_HEAD.size : _HEAD.size + length])
    offset, total = _HEAD.size + length, view.nbytes
    views: dict[str, Array] = {}
    for spec in specs:
        start = offset + -offset % ALIGNMENT
        end = start + nbytes_of(spec)
        if end > total or view[offset:start] != _PADDING[start - offset]:
            raise _malformed(f"array {spec.name!r}: bytes {start} to {end} are not in a blob of {total}")
        if spec.name in views:
            raise _malformed(f"array {spec.name!r} comes twice")
        views[spec.name] = _view(spec, view, start)
        offset = end
    if offset != total:
        raise _malformed(f"{total - offset} bytes follow the last array of the blob")
    return views


def _read_specs(data: memoryview) -> list[TensorSpec]:
    try:
        return _specs_decoder.decode(data)
    except _UNREADABLE as error:
        raise _malformed(f"the specs of the blob are damaged: {error}") from None


def _view(spec: TensorSpec, data: memoryview, start: int = 0) -> Array:
    """Return a view of read-only ``data`` from ``start`` on; the caller has checked that the bytes exist."""
    try:
        return np.ndarray(spec.shape, DTYPES[spec.dtype], data, start)
    except ValueError as error:  # an array of 0 bytes can still have a dimension that NumPy cannot represent
        raise _malformed(f"array {spec.name!r}: shape {spec.shape}: {error}") from None


def _malformed(detail: str) -> ProtocolError:
    return ProtocolError(Code.MALFORMED, detail)
