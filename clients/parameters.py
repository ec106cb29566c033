"""Weights to and from the parameter server, without torch: names, dtypes, shapes and raw bytes.

- On the server's host the bytes go through a file that both map; elsewhere through chunks, ``CREDIT`` of them under
  way. Both ways end in the same bytes, and neither copies a version in memory more than once.
- Nothing is believed without its sha256: the server checks what is published, a reader checks what it pulled.
- Async only; a training loop runs it on a loop in a thread of its own, as it runs its other calls.
"""

import asyncio
import hashlib
import mmap
import os
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.manifest import NBYTES, check, lay_out
from staleflow.protocols.wire.messages import (
    BeginPublish,
    Chunk,
    CommitPublish,
    Done,
    GetChunk,
    GetManifest,
    GetStatus,
    Manifest,
    ManifestOf,
    PublishChunk,
    PublishTo,
    Registered,
    Status,
    TensorEntry,
    Unpin,
)
from staleflow.protocols.wire.tensors import Array
from staleflow.runtime.client import Client
from staleflow.runtime.errors import Refused, Unavailable
from staleflow.runtime.host import boot_id
from staleflow.runtime.transport import SOCKETS, Transport

CHUNK_BYTES = 4 << 20
"""Of one message. A server may send less at once than it is asked for."""
CREDIT = 4
"""Chunks under way at once."""
TRIES = 5
"""Uploads of one version: a server that started again has forgotten the one under way."""
UNPIN_TIMEOUT_S = 5.0

_NUMPY = {"bool": "?", "float16": "<u2", "bfloat16": "<u2"}
"""Dtypes of which NumPy gets the bits; the others it knows by name."""


class NamedTensors(Protocol):
    """Weights by name. A mapping is one; so is what gathers them one by one, each time somebody goes through."""

    def items(self) -> Iterable[tuple[str, Array]]:
        """The same names, order and bytes every time."""
        ...


class Tensor(NamedTuple):
    """One tensor: its bytes in C order, little endian."""

    name: str
    dtype: str
    """One of ``protocols.wire.manifest.NBYTES``."""
    shape: tuple[int, ...]
    data: memoryview


class CorruptWeights(Exception):
    """A pulled version is not what its manifest names."""


class Publisher:
    """The trainer's connection to the parameter server."""

    def __init__(self, address: str, *, worker: WorkerId, transport: Transport = SOCKETS) -> None:
        self._client = Client(address, worker=worker, transport=transport)

    async def publish(
        self,
        weights: NamedTensors,
        *,
        trainer_term: TrainerTerm,
        lineage: Lineage,
        version: Version,
        batch: BatchId | None,
    ) -> Registered:
        """Returns once the version is durable and registered. Waits for a server that is away; ``Refused`` is final.

        uint16 arrays are the bits of bfloat16. Nobody may change the arrays before the end. They are gone through
        twice, for their checksums and for their bytes (once more for each upload that has to be made again).
        """
        manifest = await asyncio.to_thread(_describe, weights)
        begin = BeginPublish(
            trainer_term=trainer_term, lineage=lineage, version=version, batch=batch, manifest=manifest
        )
        for attempt in range(1, TRIES + 1):
            try:
                return await _upload(self._client, begin, weights)
            except Refused as no:
                if no.code is not Code.STALE or attempt == TRIES:
                    raise
        raise AssertionError("the last try returns or raises")

    async def damaged(self, lineage: Lineage, version: Version) -> bool:
        """Whether the server has found that its bytes of this version are not what was published."""
        return await damaged(self._client, lineage, version)

    def close(self) -> None:
        """Close the connection. May be called again."""
        self._client.close()


async def damaged(server: Client, lineage: Lineage, version: Version) -> bool:
    """Whether the parameter server has found that its bytes of this version are not what was published."""
    status = await server.ask(GetStatus(), Status, timeout_s=None)
    return any(
        (one["lineage"], one["version"]) == (lineage, version) and one["corrupt"] for one in status.values["versions"]
    )


def _tensor(name: str, array: Array) -> Tensor:
    """A view of the array where it is in C order, else a copy. ``ValueError`` for a dtype that may not travel."""
    dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
    if dtype not in NBYTES:
        raise ValueError(f"tensor {name} is {dtype}; it must be one of {', '.join(NBYTES)}")
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return Tensor(name, dtype, array.shape, little.reshape(-1).view(np.uint8).data)


def _describe(weights: NamedTensors) -> Manifest:
    tensors = (_tensor(name, array) for name, array in weights.items())
    return lay_out((t.name, t.dtype, t.shape, hashlib.sha256(t.data).hexdigest()) for t in tensors)


async def _upload(client: Client, begin: BeginPublish, weights: NamedTensors) -> Registered:
    to = await client.ask(begin, PublishTo, timeout_s=None)
    if not await asyncio.to_thread(_write_file, to, begin.manifest, weights):
        tensors = _entries(begin.manifest, weights)
        while (pair := await asyncio.to_thread(next, tensors, None)) is not None:
            await _credited(_send_chunk(client, to.upload, *piece) for piece in _pieces(*pair))
    return await client.ask(CommitPublish(upload=to.upload), Registered, timeout_s=None)


def _write_file(to: PublishTo, manifest: Manifest, weights: NamedTensors) -> bool:
    """Put the bytes where the server will look for them; False when its file is not within reach."""
    if to.host != boot_id():
        return False
    try:
        descriptor = os.open(to.path, os.O_WRONLY)
    except OSError:
        return False
    try:
        for entry, tensor in _entries(manifest, weights):
            for offset, data in _pieces(entry, tensor):
                while data.nbytes:
                    written = os.pwrite(descriptor, data, offset)
                    data, offset = data[written:], offset + written
    finally:
        os.close(descriptor)
    return True


def _entries(manifest: Manifest, weights: NamedTensors) -> Iterator[tuple[TensorEntry, Tensor]]:
    """Each tensor with its place, one in memory at a time."""
    for entry, (name, array) in zip(manifest.tensors, weights.items(), strict=True):
        yield entry, _tensor(name, array)


def _pieces(entry: TensorEntry, tensor: Tensor) -> Iterator[tuple[int, memoryview]]:
    for start in range(0, entry.nbytes, CHUNK_BYTES):
        yield entry.offset + start, tensor.data[start : start + CHUNK_BYTES]


async def _send_chunk(client: Client, upload: int, offset: int, data: memoryview) -> None:
    await client.ask(PublishChunk(upload=upload, offset=offset), Done, [data], timeout_s=None)


async def _credited(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of it, ``CREDIT`` at once."""
    waiting = iter(work)

    async def one_after_another() -> None:
        for step in waiting:
            await step

    try:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(CREDIT):
                lanes.create_task(one_after_another())
    except* (Refused, Unavailable, ProtocolError) as failed:
        first: BaseException = failed
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        error = first
    else:
        return
    raise error


class PulledVersion:
    """A version in this process's memory. Its bytes are valid, and kept by the server, until it is closed."""

    def __init__(
        self, client: Client, asked: GetManifest, manifest: Manifest, data: memoryview, *, mapped: bool
    ) -> None:
        self._client = client
        self._unpin = Unpin(worker=asked.worker, lineage=asked.lineage, version=asked.version)
        self._manifest = manifest
        self._data: memoryview | None = data
        self.lineage = asked.lineage
        self.version = asked.version
        self.sha = manifest.sha
        self.nbytes = manifest.nbytes
        self.mapped = mapped
        """True when the bytes are the server's file itself."""

    def tensors(self) -> dict[str, Tensor]:
        """By name; the bytes are read-only views, nothing is copied."""
        if self._data is None:
            raise ValueError(f"version {self.version} is closed")
        data = self._data
        return {e.name: Tensor(e.name, e.dtype, e.shape, _part(data, e)) for e in self._manifest.tensors}

    def arrays(self) -> dict[str, Array]:
        """The same for NumPy; float16 and bfloat16 as their bits in uint16."""
        return {
            name: np.frombuffer(t.data, np.dtype(_NUMPY.get(t.dtype, t.dtype))).reshape(t.shape)
            for name, t in self.tensors().items()
        }

    async def close(self) -> None:
        """Let go of the bytes and of the pin. May be called again."""
        if self._data is None:
            return
        self._data = None
        with suppress(Refused, Unavailable):
            await self._client.ask(self._unpin, Done, timeout_s=UNPIN_TIMEOUT_S)

    async def __aenter__(self) -> "PulledVersion":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Puller:
    """A reader's connection to the parameter server."""

    def __init__(self, address: str, *, worker: WorkerId, transport: Transport = SOCKETS) -> None:
        self._client = Client(address, worker=worker, transport=transport)
        self._worker = worker

    async def pull(self, lineage: Lineage, version: Version) -> PulledVersion:
        """A verified version, pinned for this worker. Waits for a server that is away.

        ``Refused`` if the server has no such version, ``CorruptWeights`` if its bytes are not those of the manifest.
        """
        asked = GetManifest(worker=self._worker, lineage=lineage, version=version)
        found = await self._client.ask(asked, ManifestOf, timeout_s=None)
        check(found.manifest)
        file = await asyncio.to_thread(_map_file, found)
        data = await _download(self._client, asked, found.manifest.nbytes) if file is None else file
        pulled = PulledVersion(self._client, asked, found.manifest, data, mapped=file is not None)
        try:
            await asyncio.to_thread(_verify, found.manifest, data)
        except CorruptWeights:
            await pulled.close()
            raise
        return pulled

    def close(self) -> None:
        """Close the connection; the server frees what is still pinned. May be called again."""
        self._client.close()


def _map_file(found: ManifestOf) -> memoryview | None:
    """The file of the version, mapped; None when it is not within reach."""
    if found.host != boot_id():
        return None
    try:
        with Path(found.path).open("rb") as file:
            if os.fstat(file.fileno()).st_size != found.manifest.nbytes:
                return None
            if found.manifest.nbytes == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    except OSError:
        return None


async def _download(client: Client, asked: GetManifest, nbytes: int) -> memoryview:
    """All bytes of the version in one buffer."""
    buffer = memoryview(bytearray(nbytes))
    pieces = (buffer[start : start + CHUNK_BYTES] for start in range(0, nbytes, CHUNK_BYTES))
    await _credited(_fill(client, asked, index * CHUNK_BYTES, piece) for index, piece in enumerate(pieces))
    return buffer.toreadonly()


async def _fill(client: Client, asked: GetManifest, offset: int, piece: memoryview) -> None:
    while piece.nbytes:
        ask = GetChunk(lineage=asked.lineage, version=asked.version, offset=offset, nbytes=piece.nbytes)
        reply, frames = await client.call(ask, timeout_s=None)
        if not isinstance(reply, Chunk) or len(frames) != 1 or not 0 < frames[0].nbytes <= piece.nbytes:
            raise ProtocolError(Code.MALFORMED, f"{client.address} answered GetChunk with no chunk of that size")
        size = frames[0].nbytes
        piece[:size] = frames[0]
        piece, offset = piece[size:], offset + size


def _verify(manifest: Manifest, data: memoryview) -> None:
    for entry in manifest.tensors:
        if hashlib.sha256(_part(data, entry)).hexdigest() != entry.sha:
            raise CorruptWeights(f"tensor {entry.name} is not what its sha256 says")


def _part(data: memoryview, entry: TensorEntry) -> memoryview:
    return data[entry.offset : entry.offset + entry.nbytes]
