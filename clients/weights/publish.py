"""The trainer's side: upload of a version to the parameter server, until it is durable and registered."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from staleflow.clients.weights import chunks
from staleflow.clients.weights.host_buffer import HostBuffer
from staleflow.clients.weights.local_upload import ServerFiles
from staleflow.clients.weights.sharded import LedWeights, RankUpload, Spans, all_spans
from staleflow.clients.weights.tensors import NamedTensors, in_memory, layout, with_digests
from staleflow.net.adaptive_chunks import AdaptiveChunk
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.net.transport import SOCKETS, Transport
from staleflow.net.weights import CHUNK_BYTES, ByteCounter
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.messages import (
    BeginPublish,
    BeginPublishReply,
    CommitPublish,
    GetStatus,
    Manifest,
    ParametersStatus,
    RegisterVersionReply,
)
from staleflow.store.disk_errors import state_of

if TYPE_CHECKING:
    from staleflow.clients.weights.direct_source import DirectSource

log = logging.getLogger(__name__)

TRIES = 5
"""Maximum number of uploads of a version of which nothing arrives, or wrong bytes.

An upload that is interrupted by a restart of the server does not count: the next one gets further.
"""
FULL_RETRY_INTERVAL_S = 1.0
"""Retry interval after the disk had no room for the bytes."""
POLL_INTERVAL_S = 1.0
"""Interval at which deleted files are dropped while the server has no room."""


class Publisher:
    """The trainer's connection to the parameter server."""

    def __init__(self, address: str, *, worker: WorkerId, transport: Transport = SOCKETS, direct: str = "") -> None:
        """``direct``: ``tcp://host:port`` (port 0: any) at which readers get the newest version from this process
        (imports torch); every version is copied once for them. Empty: off."""
        self._client = Client(address, worker=worker, transport=transport)
        self._portion = AdaptiveChunk(CHUNK_BYTES)
        self._direct = direct
        self._source: DirectSource | None = None
        self._files = ServerFiles()
        self._buffer = HostBuffer()
        self._places: Manifest | None = None
        """Layout of the last weights. Cached, because asking gathered weights for their shapes costs as much as for
        their bytes."""
        self._forgetting: asyncio.Task[None] | None = None
        """Drops deleted files of a rank that writes spans. Only rank 0 knows when the server waits for their room."""

    async def publish(
        self,
        weights: NamedTensors,
        *,
        trainer_term: TrainerTerm,
        lineage: Lineage,
        version: Version,
        batch: BatchId | None,
        released: Callable[[], None] | None = None,
    ) -> RegisterVersionReply:
        """Publish a version; return once it is durable and registered. Waits for a server that is away; ``Refused`` is
        final.

        uint16 arrays are the bits of bfloat16. The arrays must not change before the end. They are iterated once, and
        once more for each upload that has to be repeated; the first ones of this connection twice, since every version
        is expected to have their names, dtypes and shapes. Raise ``ValueError`` if it has others. ``LedWeights`` are
        not iterated, unless readers get them from this process: every rank uploads its own part.

        ``released`` is called as soon as the weights may change, if that is before the end: once they are copied.
        Weights that are served directly are copied in any case. ``LedWeights`` (each rank's part by the rank itself)
        and weights that are gathered one by one are copied if ``released`` is given and main memory has room. Arrays in
        main memory are not: an upload that is repeated, since the server was restarted, reads them again.
        """
        if (source := self._opened_source()) is not None:
            weights = await asyncio.to_thread(source.hold, weights, lineage, version)
            if released is not None:
                released()

        def announced(nbytes: int) -> BeginPublish:
            return BeginPublish(trainer_term=trainer_term, lineage=lineage, version=version, batch=batch, nbytes=nbytes)

        if isinstance(weights, LedWeights):
            return await self._publish_by_ranks(announced, weights, released)
        if self._places is None or in_memory(weights):
            self._places = await asyncio.to_thread(layout, weights)
        places, begin = self._places, announced(self._places.nbytes)
        direct = "" if source is None else source.endpoint
        try:
            if source is None and released is not None and not in_memory(weights):
                copies = await asyncio.to_thread(self._buffer.copy, places, weights)
                if copies is not None:
                    weights = copies
                    released()
            return await _repeated(places, lambda arrived: self._upload(begin, places, weights, direct, arrived))
        except ValueError:
            self._places = None
            raise

    async def _publish_by_ranks(
        self,
        announced: Callable[[int], BeginPublish],
        weights: LedWeights,
        released: Callable[[], None] | None,
    ) -> RegisterVersionReply:
        places = await asyncio.to_thread(weights.layout)
        begin = announced(places.nbytes)
        copies = await asyncio.to_thread(weights.start_uploads, copy=released is not None)
        if copies is not None and released is not None:
            released()
        own: Spans = weights if copies is None else copies
        try:
            reply = await _repeated(places, lambda arrived: self._upload_by_ranks(begin, places, weights, own, arrived))
        except Exception:
            await asyncio.to_thread(weights.end_uploads)
            raise
        await asyncio.to_thread(weights.end_uploads)
        return reply

    async def write_spans(self, to: BeginPublishReply, weights: Spans) -> RankUpload:
        """Upload this rank's part of a version that rank 0 has begun.

        A refusal by the server, or a disk without room, is returned: every rank must report to rank 0.
        """
        if self._forgetting is None:
            self._forgetting = asyncio.ensure_future(self._forget_deleted_files())
        given_up, arrived = threading.Event(), ByteCounter()
        try:
            spans = await asyncio.to_thread(self._files.write_spans, to, weights, given_up)
            if spans is None:
                spans = await chunks.send_spans(self._client, to.upload, weights.spans(), self._portion, arrived)
        except asyncio.CancelledError:
            given_up.set()
            raise
        except Refused as refusal:
            return RankUpload(arrived=arrived.nbytes, code=refusal.code, detail=refusal.detail)
        except OSError as error:
            if state_of(error) is None:
                raise
            return RankUpload(arrived=arrived.nbytes, errno=error.errno or 0, detail=error.strerror or "")
        return RankUpload(spans=spans, arrived=arrived.nbytes)

    async def damaged(self, lineage: Lineage, version: Version) -> bool:
        """Return True if the server has lost a published version, or found its bytes damaged."""
        return await damaged(self._client, lineage, version)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._source is not None:
            self._source.close()
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._files.close()
        self._client.close()

    async def _upload(
        self, begin: BeginPublish, places: Manifest, weights: NamedTensors, direct: str, arrived: ByteCounter
    ) -> RegisterVersionReply:
        to = await self._begin(begin)
        given_up = threading.Event()
        try:
            digests = await asyncio.to_thread(self._files.write, to, places, weights, given_up)
        except asyncio.CancelledError:
            given_up.set()
            raise
        in_place = digests is not None
        if digests is None:
            digests = await chunks.send(self._client, to.upload, places, weights, self._portion, arrived)
        manifest = with_digests(places, digests)
        commit = CommitPublish(upload=to.upload, manifest=manifest, in_place=in_place, direct=direct)
        return await self._client.ask(commit, RegisterVersionReply, timeout_s=None)

    async def _upload_by_ranks(
        self, begin: BeginPublish, places: Manifest, weights: LedWeights, own: Spans, arrived: ByteCounter
    ) -> RegisterVersionReply:
        to = await self._begin(begin)
        await asyncio.to_thread(weights.send_destination, to)
        uploads = await asyncio.to_thread(weights.collect, await self.write_spans(to, own))
        for upload in uploads:
            arrived(0, upload.arrived)
        commit = CommitPublish(upload=to.upload, manifest=places, spans=all_spans(uploads))
        return await self._client.ask(commit, RegisterVersionReply, timeout_s=None)

    async def _begin(self, begin: BeginPublish) -> BeginPublishReply:
        """Begin the upload, once there is room. Meanwhile, drop maps of deleted files: they would keep the room in
        use."""
        await asyncio.to_thread(self._files.forget_deleted)
        meanwhile = asyncio.ensure_future(self._forget_deleted_files())
        try:
            return await self._client.ask(begin, BeginPublishReply, timeout_s=None)
        finally:
            meanwhile.cancel()

    async def _forget_deleted_files(self) -> None:
        """Drop deleted files until cancelled."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await asyncio.to_thread(self._files.forget_deleted)

    def _opened_source(self) -> "DirectSource | None":
        """Return the source of direct transfers, if enabled; open it at the first version."""
        if self._direct and self._source is None:
            from staleflow.clients.weights.direct_source import DirectSource

            self._source = DirectSource(self._direct)
        return self._source


async def _repeated(
    places: Manifest, upload: Callable[[ByteCounter], Awaitable[RegisterVersionReply]]
) -> RegisterVersionReply:
    """Upload until the version is registered. Raise the last refusal after ``TRIES`` of which nothing arrived."""
    tries, nbytes = 0, sum(entry.nbytes for entry in places.tensors)
    while True:
        arrived = ByteCounter()
        try:
            return await upload(arrived)
        except Refused as refusal:
            tries += not 0 < arrived.nbytes < nbytes
            if refusal.code is not Code.STALE or tries == TRIES:
                raise
        except OSError as error:  # a file system may reserve room and still run out of it
            if state_of(error) is None:
                raise
            log.warning("no room: %s", error)
            await asyncio.sleep(FULL_RETRY_INTERVAL_S)


async def damaged(server: Client, lineage: Lineage, version: Version) -> bool:
    """Return True if the parameter server has lost a published version, or found its bytes damaged."""
    status = await server.ask(GetStatus(), ParametersStatus, timeout_s=None)
    return (lineage, version) not in [(one.lineage, one.version) for one in status.versions if not one.corrupt]
