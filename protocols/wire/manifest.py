"""The manifest of a version of the weights: its tensors, one after another, each with a digest of its bytes.

Publisher and server lay out a version with this module. A reader uses no manifest that ``check`` has not passed.
"""

import hashlib
import math
from collections.abc import Iterable
from typing import Final

import msgspec
import xxhash

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.messages import Manifest, TensorEntry

NBYTES: Final[dict[str, int]] = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes of one element, for every dtype that a version may hold."""

ALIGNMENT: Final = 64
"""Each tensor starts at a multiple of this many bytes."""

MAX_BYTES: Final = 1 << 48
"""Maximum size of one version: more than any disk holds, and far below the limit of file offsets."""

MAX_DIMENSIONS: Final = 64
"""Maximum dimensions of one tensor, as in torch."""


class Digest:
    """Incremental digest of a tensor's bytes: xxh3-128, ten times as fast as a memory copy."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Data) -> None:
        """Add the next bytes."""
        self._state.update(data)

    def hex(self) -> str:
        """Return the digest as 32 hex digits."""
        return self._state.hexdigest()


def digest(data: Data) -> str:
    """Return the digest of a contiguous buffer."""
    state = Digest()
    state.update(data)
    return state.hex()


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> Manifest:
    """Return the manifest of tensors given as (name, dtype, shape, hex ``Digest`` of the bytes), in their order."""
    entries: list[TensorEntry] = []
    end = 0
    for name, dtype, shape, checksum in tensors:
        offset = end + -end % ALIGNMENT
        nbytes = math.prod(shape) * NBYTES[dtype]
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes, digest=checksum))
        end = offset + nbytes
    return Manifest(tensors=entries, nbytes=end, sha=hashlib.sha256(msgspec.msgpack.encode(entries)).hexdigest())


def check(manifest: Manifest) -> None:
    """Raise ``ProtocolError`` unless ``lay_out`` can have written it: known dtypes, no overlap or gap, right sha256."""
    _check_entries(manifest.tensors)
    expected = lay_out((entry.name, entry.dtype, entry.shape, entry.digest) for entry in manifest.tensors)
    if expected.tensors != manifest.tensors or expected.nbytes != manifest.nbytes:
        raise _malformed("the offsets of the manifest are not those of its tensors in order")
    if expected.sha != manifest.sha:
        raise _malformed("the sha256 of the manifest is not that of its entries")


def _check_entries(tensors: list[TensorEntry]) -> None:
    """Check the entries before offsets are computed from them: names, dtypes, shapes and the total size."""
    names = [entry.name for entry in tensors]
    if not names:
        raise _malformed("a version has at least one tensor")
    if len(set(names)) != len(names):
        raise _malformed("a tensor comes twice in the manifest")
    nbytes = 0
    for entry in tensors:
        if entry.dtype not in NBYTES:
            raise _malformed(f"tensor {entry.name!r}: dtype {entry.dtype!r} is not one of {', '.join(NBYTES)}")
        if len(entry.shape) > MAX_DIMENSIONS:
            raise _malformed(f"tensor {entry.name!r}: {len(entry.shape)} dimensions; at most {MAX_DIMENSIONS}")
        if any(extent < 0 for extent in entry.shape):
            raise _malformed(f"tensor {entry.name!r}: shape {entry.shape} holds a negative extent")
        nbytes += ALIGNMENT + math.prod(entry.shape) * NBYTES[entry.dtype]
        if nbytes > MAX_BYTES:
            raise _malformed(f"tensor {entry.name!r}: a version has at most {MAX_BYTES} bytes")


def _malformed(detail: str) -> ProtocolError:
    return ProtocolError(Code.MALFORMED, detail)
