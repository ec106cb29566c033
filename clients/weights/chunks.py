"""Bytes of a version from a publisher on another host, a few messages of them under way."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from staleflow.clients.weights.tensors import NamedTensors, Tensor, tensor_of
from staleflow.net.adaptive_chunks import AdaptiveChunk, Stuck
from staleflow.net.client import Client
from staleflow.net.weights import CHUNK_BYTES, ByteCounter, credited
from staleflow.protocols.wire.manifest import digest
from staleflow.protocols.wire.messages import Done, Manifest, PublishChunk, TensorEntry


async def send(
    client: Client, upload: int, places: Manifest, weights: NamedTensors, portion: AdaptiveChunk, arrived: ByteCounter
) -> list[str]:
    """All bytes of a version, one tensor in memory at a time. Returns the digest of each."""
    taken, digests = _taken(places, weights), list[str]()
    while (one := await asyncio.to_thread(next, taken, None)) is not None:
        entry, tensor, found = one
        digests.append(found)
        cut = pieces(entry, tensor, CHUNK_BYTES)
        await credited(_send_chunk(client, upload, *piece, portion, arrived) for piece in cut)
    return digests


def _taken(places: Manifest, weights: NamedTensors) -> Iterator[tuple[TensorEntry, Tensor, str]]:
    """Each tensor with its place and its digest, when it is asked for."""
    for entry, (name, array) in zip(places.tensors, weights.items(), strict=True):
        tensor = tensor_of(name, array)
        yield entry, tensor, digest(tensor.data)


def pieces(entry: TensorEntry, tensor: Tensor, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """The bytes of a tensor, so many at most at once, each with its place in the version.

    ``ValueError`` when it is not the one that belongs there.
    """
    if (found := (tensor.name, tensor.dtype, tensor.shape)) != (entry.name, entry.dtype, entry.shape):
        raise ValueError(f"{found} came where {(entry.name, entry.dtype, entry.shape)} was announced")
    starts = range(0, entry.nbytes, nbytes)
    return ((entry.offset + start, tensor.data[start : start + nbytes]) for start in starts)


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
