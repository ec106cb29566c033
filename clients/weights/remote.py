"""A version for a reader that cannot map the server's file: in memory of its own, whole or by what changed.

- The memory of a version is that of the one before, once nobody has a view of it.
- On a link so slow that it pays, the bytes of the version that was loaded last are kept, and pinned where they came
  from, as the base of the next: the server sends what changed, and it is written over them.
- Whichever way was faster when it was last taken is taken again. A delta that cannot be had, or does not give the
  version, is followed by the whole version: no reader ever sees the difference.
"""

import asyncio
import logging
import mmap
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
    """A pulled version is not what its manifest names."""


@dataclass(frozen=True, slots=True, eq=False)
class Brought:
    """A verified version in memory, pinned at ``client`` until somebody unpins it."""

    client: Client
    asked: GetManifest
    manifest: Manifest
    buffer: mmap.mmap


class _Coming:
    """A version on its way from ``client``."""

    def __init__(self, client: Client, *, watched: bool) -> None:
        self._client = client
        self._watched = watched
        self.moved = ByteCounter()

    async def wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Until its bytes have come; what is done with them in this process is not the server's time."""
        await (while_alive(self._client, work, self.moved) if self._watched else work)


class Remote:
    """What one reader has brought over the network, and the base that it keeps for the next time."""

    def __init__(self, *, deltas: bool = True) -> None:
        self._ways = DeltaChoice(deltas=deltas)
        self._chunk_sizes = ChunkSizes()
        self._base: Brought | None = None
        self._spare: mmap.mmap | None = None
        """Memory of the last version, where that is not the base."""

    async def bring(self, client: Client, asked: GetManifest, manifest: Manifest, *, watched: bool = False) -> Brought:
        """The version that was asked for and is pinned. ``Refused``, ``Unavailable`` or ``ProtocolError`` from its
        server, which is waited for unless it is ``watched``; ``CorruptWeights``."""
        coming = _Coming(client, watched=watched)
        base, self._base = self._base, None
        source = Source(client=client, pace=Pace(), chunk_sizes=self._chunk_sizes)
        try:
            if base is not None and not is_free(base.buffer):  # somebody kept an array of it
                base = replace(base, buffer=await asyncio.to_thread(_copied, base.buffer))
            if base is not None and await self._by_delta(source, asked, manifest, base, coming):
                return Brought(client, asked, manifest, base.buffer)
            buffer = self._take(manifest.nbytes) if base is None else base.buffer
            buffer = buffer if len(buffer) == manifest.nbytes else room(manifest.nbytes)
            await self._whole(source, asked, manifest, memoryview(buffer), coming)
            return Brought(client, asked, manifest, buffer)
        except Unavailable:
            if not coming.moved.nbytes:  # the base is what it was: another server may know it
                self._base, base = base, None
            raise
        finally:
            if base is not None and (base.client, base.asked) != (client, asked):
                await unpin(base.client, base.asked)

    async def let_go(self, brought: Brought) -> None:
        """Nobody is to look at these bytes any more: the base of the next version, or unpinned and written over."""
        if self._ways.delta_pays and self._base is None:
            self._base, self._spare = brought, None
            await unpin(brought.client, brought.asked, base=True)
            return
        await unpin(brought.client, brought.asked)
        if self._base is None:
            self._spare = brought.buffer

    def _take(self, nbytes: int) -> mmap.mmap:
        """Memory for a version: what held the last one, since fresh pages cost several times what written ones do."""
        spare, self._spare = self._spare, None
        return spare if spare is not None and len(spare) == nbytes and is_free(spare) else room(nbytes)

    async def _by_delta(
        self, source: Source, asked: GetManifest, manifest: Manifest, base: Brought, coming: _Coming
    ) -> bool:
        """True when the base's buffer holds the version now; otherwise it holds nothing of use."""
        if not delta.comparable(base.manifest, manifest):
            return False
        began = asyncio.get_running_loop().time()
        target, spans = memoryview(base.buffer), delta.spans(base.manifest, manifest, most_bytes=weights.SPAN_BYTES)
        try:
            moved = coming.moved
            work = changes(source, asked, base.asked, spans, target, lambda ask, _: moved(ask.offset, ask.nbytes))
            await coming.wait(work)
            await asyncio.to_thread(verify, manifest, target)
        except (Refused, ProtocolError, CorruptWeights) as error:
            log.warning("version %d comes whole, not as a delta: %s", asked.version, error)
            return False
        self._ways.delta_took(manifest.nbytes, asyncio.get_running_loop().time() - began)
        return True

    async def _whole(
        self, source: Source, asked: GetManifest, manifest: Manifest, target: memoryview, coming: _Coming
    ) -> None:
        began = asyncio.get_running_loop().time()
        await coming.wait(whole(source, asked, [(0, manifest.nbytes)], target, coming.moved))
        await asyncio.to_thread(verify, manifest, target)
        self._ways.whole_took(manifest.nbytes, asyncio.get_running_loop().time() - began)


def room(nbytes: int) -> mmap.mmap:
    """Memory of which the system gives each page when it is first written. A ``bytearray`` is filled with zeros at
    once: seconds for a large version, in which every thread of the process waits."""
    return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def is_free(buffer: mmap.mmap) -> bool:
    """Whether nobody has a view of these bytes: only then may they be written over."""
    try:
        buffer.resize(len(buffer))  # Python refuses to move what others look at
    except BufferError:
        return False
    return True


def _copied(buffer: mmap.mmap) -> mmap.mmap:
    """The same bytes elsewhere; other threads go on meanwhile."""
    copy = room(len(buffer))
    np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(buffer, np.uint8))
    return copy


def verify(manifest: Manifest, data: memoryview) -> None:
    """``CorruptWeights`` names the first tensor that is not what the manifest says."""
    for entry in manifest.tensors:
        if not is_right(entry, data):
            raise CorruptWeights(f"tensor {entry.name} is not what its digest says")


async def unpin(client: Client, asked: GetManifest, *, base: bool = False) -> None:
    """The server may forget the version, as far as this worker is concerned; a ``base`` when it has to."""
    with suppress(Refused, Unavailable, ProtocolError, ConfigError):
        message = Unpin(worker=asked.worker, lineage=asked.lineage, version=asked.version, base=base)
        await client.ask(message, Done, timeout_s=UNPIN_TIMEOUT_S)
