"""Transfer of a version to a reader that cannot map the server's file: into its own memory, whole or as a delta.

- The memory of the previous version is reused if no view of it exists.
- On a connection slow enough for that to pay, the bytes of the last loaded version are kept, and pinned at their
  source, as the base of the next one: the server sends a delta, which is applied to them.
- The way that was faster the last time is used again. If a delta is unavailable or does not produce the version, the
  whole version is fetched; the reader sees no difference.
"""

import asyncio
import logging
import mmap
import os
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from staleflow.configs.errors import ConfigError
from staleflow.net import weights
from staleflow.net.client import Client
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.weights import (
    ByteCounter,
    ChunkSizes,
    DeltaChoice,
    Pace,
    Source,
    changes,
    is_right,
    while_alive,
    whole,
)
from staleflow.protocols.wire import delta
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Done, GetManifest, Manifest, Unpin

log = logging.getLogger(__name__)

UNPIN_TIMEOUT_S = 5.0


class CorruptWeights(Exception):
    """A pulled version does not match its manifest."""


@dataclass(frozen=True, slots=True, eq=False)
class RemoteVersion:
    """A verified version in memory, pinned at ``client`` until it is unpinned."""

    client: Client
    asked: GetManifest
    manifest: Manifest
    buffer: mmap.mmap


class _Transfer:
    """A transfer of a version from ``client``."""

    def __init__(self, client: Client, *, watched: bool) -> None:
        self._client = client
        self._watched = watched
        self.moved = ByteCounter()

    async def wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for the bytes. Time that this process spends on them does not count against the server."""
        await (while_alive(self._client, work, self.moved) if self._watched else work)


class Remote:
    """Versions that one reader has fetched over the network, and the base that it keeps for the next delta."""

    def __init__(self, *, deltas: bool = True) -> None:
        self._ways = DeltaChoice(deltas=deltas)
        self._chunk_sizes = ChunkSizes()
        self._base: RemoteVersion | None = None
        self._spare: mmap.mmap | None = None
        """Memory of the last version, unless that is the base."""

    async def fetch(
        self, client: Client, asked: GetManifest, manifest: Manifest, *, watched: bool = False
    ) -> RemoteVersion:
        """Fetch a pinned version.

        Raise ``Refused``, ``Unavailable`` or ``ProtocolError`` of its server, or ``CorruptWeights``. Waits for a server
        that is away, unless ``watched``.
        """
        transfer = _Transfer(client, watched=watched)
        base, self._base = self._base, None
        source = Source(client=client, pace=Pace(), chunk_sizes=self._chunk_sizes)
        try:
            if base is not None and not is_free(base.buffer):  # the caller kept an array of it
                base = replace(base, buffer=await asyncio.to_thread(_copied, base.buffer))
            if base is not None and await self._by_delta(source, asked, manifest, base, transfer):
                return RemoteVersion(client, asked, manifest, base.buffer)
            buffer = self._take(manifest.nbytes) if base is None else base.buffer
            buffer = buffer if len(buffer) == manifest.nbytes else room(manifest.nbytes)
            await self._whole(source, asked, manifest, memoryview(buffer), transfer)
            return RemoteVersion(client, asked, manifest, buffer)
        except Unavailable:
            if not transfer.moved.nbytes:  # the base is unmodified: another server may have it, too
                self._base, base = base, None
            raise
        finally:
            if base is not None and (base.client, base.asked) != (client, asked):
                await unpin(base.client, base.asked)

    async def release(self, released: RemoteVersion) -> None:
        """Release a version: keep it as the base of the next one, or unpin it and reuse its memory. No view of it
        may be used any more."""
        if self._ways.delta_pays and self._base is None:
            self._base, self._spare = released, None
            await unpin(released.client, released.asked, base=True)
            return
        await unpin(released.client, released.asked)
        if self._base is None:
            self._spare = released.buffer

    async def memory(self, nbytes: int) -> mmap.mmap:
        """Return memory for a version that comes another way; give up the base of the next delta, which is older."""
        base, self._base = self._base, None
        if base is not None:
            self._spare = base.buffer
            await unpin(base.client, base.asked)
        return self._take(nbytes)

    def _take(self, nbytes: int) -> mmap.mmap:
        """Return memory for a version: that of the last one if possible, since fresh pages cost several times as
        much as written ones."""
        spare, self._spare = self._spare, None
        return spare if spare is not None and len(spare) == nbytes and is_free(spare) else room(nbytes)

    async def _by_delta(
        self, source: Source, asked: GetManifest, manifest: Manifest, base: RemoteVersion, transfer: _Transfer
    ) -> bool:
        """Apply a delta to the buffer of the base; return True if it is the new version then. Otherwise its content
        is undefined."""
        if not delta.comparable(base.manifest, manifest):
            return False
        began = asyncio.get_running_loop().time()
        target, spans = memoryview(base.buffer), delta.spans(base.manifest, manifest, most_bytes=weights.SPAN_BYTES)
        try:
            moved = transfer.moved
            work = changes(source, asked, base.asked, spans, target, lambda ask, _: moved(ask.offset, ask.nbytes))
            await transfer.wait(work)
            await asyncio.to_thread(verify, manifest, target)
        except (Refused, ProtocolError, CorruptWeights) as error:
            log.warning("version %d is fetched whole, not as a delta: %s", asked.version, error)
            return False
        self._ways.delta_took(manifest.nbytes, asyncio.get_running_loop().time() - began)
        return True

    async def _whole(
        self, source: Source, asked: GetManifest, manifest: Manifest, target: memoryview, transfer: _Transfer
    ) -> None:
        began = asyncio.get_running_loop().time()
        await transfer.wait(whole(source, asked, [(0, manifest.nbytes)], target, transfer.moved))
        await asyncio.to_thread(verify, manifest, target)
        self._ways.whole_took(manifest.nbytes, asyncio.get_running_loop().time() - began)


def room(nbytes: int) -> mmap.mmap:
    """Allocate memory whose pages are zeroed on first write, as an unnamed file.

    Other processes can map such a file, so that an engine whose workers are processes loads from it without a copy in
    between. A ``bytearray`` would be zeroed at once: for a large version that takes seconds, during which it blocks
    every thread of the process.
    """
    with open(os.memfd_create("staleflow-weights"), "wb") as file:
        file.truncate(max(nbytes, 1))
        return mmap.mmap(file.fileno(), max(nbytes, 1))


def is_free(buffer: mmap.mmap) -> bool:
    """Return True if no view of these bytes exists, so that they may be overwritten."""
    try:
        buffer.resize(len(buffer))  # a resize fails while exported views exist
    except BufferError:
        return False
    return True


def _copied(buffer: mmap.mmap) -> mmap.mmap:
    """Copy the bytes; other threads continue meanwhile."""
    copy = room(len(buffer))
    np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(buffer, np.uint8))
    return copy


def verify(manifest: Manifest, data: memoryview) -> None:
    """Raise ``CorruptWeights`` for the first tensor that does not match the manifest."""
    for entry in manifest.tensors:
        if not is_right(entry, data):
            raise CorruptWeights(f"tensor {entry.name} does not match its digest")


async def unpin(client: Client, asked: GetManifest, *, base: bool = False) -> None:
    """Unpin a version for this worker; ``base``: keep it as a base while there is room."""
    with suppress(Refused, Unavailable, ProtocolError, ConfigError):
        message = Unpin(worker=asked.worker, lineage=asked.lineage, version=asked.version, base=base)
        await client.ask(message, Done, timeout_s=UNPIN_TIMEOUT_S)
