"""The spans of a version that several ranks wrote: together they are every byte of every tensor exactly once."""

from bisect import bisect_right
from collections.abc import Iterable

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Manifest, TensorEntry, WrittenSpan


def by_tensor(manifest: Manifest, spans: Iterable[WrittenSpan]) -> list[list[WrittenSpan]]:
    """Return the spans of each tensor of a checked manifest, in the order of their bytes.

    Raise ``ProtocolError`` unless they tile every tensor: no gap, no overlap, no span across the end of a tensor.
    Positions in its text count from the first byte of the tensor.
    """
    entries = manifest.tensors
    if (digested := next((entry.name for entry in entries if entry.digest), None)) is not None:
        raise _malformed(f"tensor {digested!r} has a digest; in a version of spans, only the spans have one")
    starts = [entry.offset for entry in entries]
    tiles: list[list[WrittenSpan]] = [[] for _ in entries]
    for span in sorted(spans, key=lambda span: span.offset):
        if span.offset < 0:
            raise _malformed(f"a span starts at byte {span.offset}; the first byte of a version is 0")
        tiles[bisect_right(starts, span.offset) - 1].append(span)
    for entry, own in zip(entries, tiles, strict=True):
        _check_tiles(entry, own)
    return tiles


def _check_tiles(entry: TensorEntry, spans: list[WrittenSpan]) -> None:
    position = 0
    for span in spans:
        start = span.offset - entry.offset
        end = start + span.nbytes
        if span.nbytes < 1 or end > entry.nbytes:
            raise _wrong(entry, f"a span has bytes {start} to {end} of {entry.nbytes}")
        if start > position:
            raise _wrong(entry, f"bytes {position} to {start} of {entry.nbytes} are in no span")
        if start < position:
            raise _wrong(entry, f"bytes {start} to {min(position, end)} of {entry.nbytes} are in two spans")
        position = end
    if position < entry.nbytes:
        raise _wrong(entry, f"bytes {position} to {entry.nbytes} of {entry.nbytes} are in no span")


def _wrong(entry: TensorEntry, detail: str) -> ProtocolError:
    return _malformed(f"tensor {entry.name!r}: {detail}")


def _malformed(detail: str) -> ProtocolError:
    return ProtocolError(Code.MALFORMED, detail)
