"""Verification of a version that several ranks wrote, in one pass over its bytes: spans, then digests of the tensors.

xxh3 has no way to combine the digests of two spans, so one process must read each tensor from its first to its last
byte. The server reads the pages that the ranks have just written.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from staleflow.protocols.wire.manifest import Digest, lay_out
from staleflow.protocols.wire.messages import Manifest, TensorEntry, WrittenSpan
from staleflow.servers.parameters.versions import READ_BYTES, CorruptVersion, pieces, reading

READERS = 4
"""Threads of a verification: one core does not saturate the memory of a large machine."""


def digested(path: Path, manifest: Manifest, tiles: Sequence[Sequence[WrittenSpan]]) -> Manifest:
    """Return the manifest with the digests of its tensors. ``tiles``: the spans of each (``wire.spans.by_tensor``).

    Raise ``CorruptVersion`` if the bytes of a span do not match its digest, or ``Scarce``.
    """
    with reading(path, manifest.nbytes) as descriptor, ThreadPoolExecutor(READERS) as readers:

        def digest(entry: TensorEntry, spans: Sequence[WrittenSpan]) -> str:
            return _digest(descriptor, path.name, entry, spans)

        digests = list(readers.map(digest, manifest.tensors, tiles))
    entries = zip(manifest.tensors, digests, strict=True)
    return lay_out((entry.name, entry.dtype, entry.shape, digest) for entry, digest in entries)


def _digest(descriptor: int, name: str, entry: TensorEntry, spans: Sequence[WrittenSpan]) -> str:
    whole, buffer = Digest(), memoryview(bytearray(min(READ_BYTES, entry.nbytes)))
    for span in spans:
        part = whole if len(spans) == 1 else Digest()
        for piece in pieces(descriptor, span.offset, span.nbytes, buffer):
            part.update(piece)
            if part is not whole:
                whole.update(piece)
        if part.hex() != span.digest:
            start = span.offset - entry.offset
            raise CorruptVersion(
                f"bytes {start} to {start + span.nbytes} of tensor {entry.name} in {name} do not match their digest"
            )
    return whole.hex()
