"""Upload of a version from a publisher on another host, with several messages in flight."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from staleflow.clients.weights.sharded import Span
from staleflow.clients.weights.tensors import NamedTensors, Tensor, tensor_of
from staleflow.net.adaptive_chunks import AdaptiveChunk, Stuck
from staleflow.net.client import Client
from staleflow.net.weights import CHUNK_BYTES, ByteCounter, credited
from staleflow.protocols.wire.manifest import digest
from staleflow.protocols.wire.messages import Done, Manifest, PublishChunk, TensorEntry, WrittenSpan


async def send(
    client: Client, upload: int, places: Manifest, weights: NamedTensors, portion: AdaptiveChunk, arrived: ByteCounter
) -> list[str]:
    """Send all bytes of a version, one tensor in memory at a time. Return the digest of each tensor."""
    tensors, digests = _with_digests(places, weights), list[str]()
    while (one := await asyncio.to_thread(next, tensors, None)) is not None:
        entry, tensor, tensor_digest = one
        digests.append(tensor_digest)
        cut = pieces(entry, tensor, CHUNK_BYTES)
        await credited(_send_chunk(client, upload, *piece, portion, arrived) for piece in cut)
    return digests


async def send_spans(
    client: Client, upload: int, spans: Iterator[Span], portion: AdaptiveChunk, arrived: ByteCounter
) -> list[WrittenSpan]:
    """Send one rank's bytes of a version, one span in memory at a time. Return the spans with their digests."""
    digested, written = ((span, digest(span.data)) for span in spans), list[WrittenSpan]()
    while (one := await asyncio.to_thread(next, digested, None)) is not None:
        (offset, data), span_digest = one
        written.append(WrittenSpan(offset=offset, nbytes=data.nbytes, digest=span_digest))
        cut = split(offset, data, CHUNK_BYTES)
        await credited(_send_chunk(client, upload, *piece, portion, arrived) for piece in cut)
    return written


def _with_digests(places: Manifest, weights: NamedTensors) -> Iterator[tuple[TensorEntry, Tensor, str]]:
    """Yield each tensor with its place and its digest, computed on demand."""
    for entry, (name, array) in zip(places.tensors, weights.items(), strict=True):
        tensor = tensor_of(name, array)
        yield entry, tensor, digest(tensor.data)


def pieces(entry: TensorEntry, tensor: Tensor, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Split a tensor into pieces of at most ``nbytes``, each with its offset in the version.

    Raise ``ValueError`` if it is not the tensor that was announced.
    """
    if (actual := (tensor.name, tensor.dtype, tensor.shape)) != (entry.name, entry.dtype, entry.shape):
        raise ValueError(f"unexpected tensor {actual}; {(entry.name, entry.dtype, entry.shape)} was announced")
    return split(entry.offset, tensor.data, nbytes)


def split(offset: int, data: memoryview, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Split bytes into pieces of at most ``nbytes``, each with its offset in the version."""
    return ((offset + start, data[start : start + nbytes]) for start in range(0, data.nbytes, nbytes))


async def _send_chunk(
    client: Client, upload: int, offset: int, data: memoryview, portion: AdaptiveChunk, arrived: ByteCounter
) -> None:
    while data.nbytes:
        piece = data[: portion.nbytes]
        sending = client.ask(PublishChunk(upload=upload, offset=offset), Done, [piece], timeout_s=None)
        with suppress(Stuck):
            await portion.carry(client, sending, piece.nbytes)
            arrived(offset, piece.nbytes)
            offset, data = offset + piece.nbytes, data[piece.nbytes :]
