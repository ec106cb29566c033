"""A version for a reader that cannot map the server's file: in memory of its own, whole or by what changed.

- The memory of a version is that of the one before, once nobody has a view of it.
- On a link so slow that it pays, the bytes of the version that was loaded last are kept, and pinned where they came
  from, as the base of the next: the server sends what changed, and it is written over them.
- Whichever way was faster when it was last taken is taken again. A delta that cannot be had, or does not give the
  version, is followed by the whole version: no reader ever sees the difference.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace

from staleflow.protocols.wire import delta
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Done, GetManifest, Manifest, Unpin
from staleflow.runtime import weights
from staleflow.runtime.client import Client
from staleflow.runtime.errors import Refused, Unavailable
from staleflow.runtime.weights import Moved, Pace, Portions, Source, Ways, changes, is_right, whole

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
    buffer: bytearray


class Remote:
    """What one reader has brought over the network, and the base that it keeps for the next time."""

    def __init__(self, *, deltas: bool = True) -> None:
        self._ways = Ways(deltas=deltas)
        self._portions = Portions()
        self._base: Brought | None = None
        self._spare = bytearray()
        """Memory of the last version, where that is not the base."""

    async def bring(
        self, client: Client, asked: GetManifest, manifest: Manifest, moved: Moved | None = None
    ) -> Brought:
        """The version that was asked for and is pinned; ``moved`` counts on the way. ``Refused``, ``Unavailable`` or
        ``ProtocolError`` from its server; ``CorruptWeights``."""
        moved = moved or Moved()
        base, self._base = self._base, None
        if base is not None and not is_free(base.buffer):  # somebody kept an array of it
            base = replace(base, buffer=bytearray(base.buffer))
        source = Source(client=client, pace=Pace(), portions=self._portions)
        try:
            if base is not None and await self._by_delta(source, asked, manifest, base, moved):
                return Brought(client, asked, manifest, base.buffer)
            buffer = self._take(manifest.nbytes) if base is None else base.buffer
            buffer = buffer if len(buffer) == manifest.nbytes else bytearray(manifest.nbytes)
            await self._whole(source, asked, manifest, memoryview(buffer), moved)
            return Brought(client, asked, manifest, buffer)
        finally:
            if base is not None and (base.client, base.asked) != (client, asked):
                await unpin(base.client, base.asked)

    async def let_go(self, brought: Brought) -> None:
        """Nobody is to look at these bytes any more: the base of the next version, or unpinned and written over."""
        if self._ways.delta_pays and self._base is None:
            self._base, self._spare = brought, bytearray()
            await unpin(brought.client, brought.asked, base=True)
            return
        await unpin(brought.client, brought.asked)
        if self._base is None:
            self._spare = brought.buffer

    def _take(self, nbytes: int) -> bytearray:
        """Memory for a version: what held the last one, since fresh pages cost several times what written ones do."""
        spare, self._spare = self._spare, bytearray()
        return spare if len(spare) == nbytes and is_free(spare) else bytearray(nbytes)

    async def _by_delta(
        self, source: Source, asked: GetManifest, manifest: Manifest, base: Brought, moved: Moved
    ) -> bool:
        """True when the base's buffer holds the version now; otherwise it holds nothing of use."""
        if not delta.comparable(base.manifest, manifest):
            return False
        began = asyncio.get_running_loop().time()
        target, spans = memoryview(base.buffer), delta.spans(base.manifest, manifest, most_bytes=weights.SPAN_BYTES)
        try:
            await changes(source, asked, base.asked, spans, target, lambda ask, _: moved(ask.offset, ask.nbytes))
            await asyncio.to_thread(verify, manifest, target)
        except (Refused, ProtocolError, CorruptWeights) as error:
            log.warning("version %d comes whole, not as a delta: %s", asked.version, error)
            return False
        self._ways.delta_took(manifest.nbytes, asyncio.get_running_loop().time() - began)
        return True

    async def _whole(
        self, source: Source, asked: GetManifest, manifest: Manifest, target: memoryview, moved: Moved
    ) -> None:
        began = asyncio.get_running_loop().time()
        await whole(source, asked, [(0, manifest.nbytes)], target, moved)
        await asyncio.to_thread(verify, manifest, target)
        self._ways.whole_took(manifest.nbytes, asyncio.get_running_loop().time() - began)


def is_free(buffer: bytearray) -> bool:
    """Whether nobody has a view of these bytes: only then may they be written over."""
    try:
        buffer.append(0)  # Python refuses to move what others look at
    except BufferError:
        return False
    del buffer[-1]
    return True


def verify(manifest: Manifest, data: memoryview) -> None:
    """``CorruptWeights`` names the first tensor that is not what the manifest says."""
    for entry in manifest.tensors:
        if not is_right(entry, data):
            raise CorruptWeights(f"tensor {entry.name} is not what its digest says")


async def unpin(client: Client, asked: GetManifest, *, base: bool = False) -> None:
    """The server may forget the version, as far as this worker is concerned; a ``base`` when it has to."""
    with suppress(Refused, Unavailable):
        message = Unpin(worker=asked.worker, lineage=asked.lineage, version=asked.version, base=base)
        await client.ask(message, Done, timeout_s=UNPIN_TIMEOUT_S)
