"""The trainer's side: a version goes to the parameter server, and is durable and registered at the end."""

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

from staleflow.clients.weights import chunks
from staleflow.clients.weights.local_upload import ServerFiles
from staleflow.clients.weights.tensors import NamedTensors, described, in_memory, layout
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
    RegisterVersionReply,
    Status,
)
from staleflow.store.disk_errors import state_of

if TYPE_CHECKING:
    from staleflow.clients.weights.direct_source import DirectSource

log = logging.getLogger(__name__)

TRIES = 5
"""Uploads of one version of which nothing arrives, or other bytes than were sent. One that is lost on its way, with a
server that starts again, does not count: the next one gets farther."""
FULL_S = 1.0
"""After this the bytes are written again that the disk had no room for."""
POLL_INTERVAL_S = 1.0
"""Between looks, while the server finds no room, at which files it has deleted."""


class Publisher:
    """The trainer's connection to the parameter server."""

    def __init__(self, address: str, *, worker: WorkerId, transport: Transport = SOCKETS, direct: str = "") -> None:
        """``direct``: ``tcp://host:port`` (0: any), where readers get the newest version from this process itself
        (imports torch); it is copied for them then, once a version. Empty: nowhere."""
        self._client = Client(address, worker=worker, transport=transport)
        self._portion = AdaptiveChunk(CHUNK_BYTES)
        self._direct = direct
        self._source: DirectSource | None = None
        self._files = ServerFiles()
        self._places: Manifest | None = None
        """Of the weights that came last: to ask gathered ones for their shapes takes as long as for their bytes."""

    async def publish(
        self,
        weights: NamedTensors,
        *,
        trainer_term: TrainerTerm,
        lineage: Lineage,
        version: Version,
        batch: BatchId | None,
    ) -> RegisterVersionReply:
        """Returns once the version is durable and registered. Waits for a server that is away; ``Refused`` is final.

        uint16 arrays are the bits of bfloat16. Nobody may change the arrays before the end. They are gone through
        once, and once more for each upload that has to be made again; the first ones of this connection twice, since
        every version is expected to have their names, dtypes and shapes. ``ValueError`` when it has others.
        """
        if (source := self._opened_source()) is not None:
            weights = await asyncio.to_thread(source.hold, weights, lineage, version)
        if self._places is None or in_memory(weights):
            self._places = await asyncio.to_thread(layout, weights)
        places = self._places
        begin = BeginPublish(
            trainer_term=trainer_term, lineage=lineage, version=version, batch=batch, nbytes=places.nbytes
        )
        tries, direct = 0, "" if source is None else source.endpoint
        nbytes = sum(entry.nbytes for entry in places.tensors)
        while True:
            arrived = ByteCounter()
            try:
                return await self._upload(begin, places, weights, direct, arrived)
            except ValueError:
                self._places = None
                raise
            except Refused as no:
                tries += not 0 < arrived.nbytes < nbytes
                if no.code is not Code.STALE or tries == TRIES:
                    raise
            except OSError as error:  # a file system may reserve room, and have none all the same
                if state_of(error) is None:
                    raise
                log.warning("no room: %s", error)
                await asyncio.sleep(FULL_S)

    async def damaged(self, lineage: Lineage, version: Version) -> bool:
        """Whether the server has lost a version that was published, or found that its bytes are others."""
        return await damaged(self._client, lineage, version)

    def close(self) -> None:
        """Close the connection. May be called again."""
        if self._source is not None:
            self._source.close()
        self._files.close()
        self._client.close()

    async def _upload(
        self, begin: BeginPublish, places: Manifest, weights: NamedTensors, direct: str, arrived: ByteCounter
    ) -> RegisterVersionReply:
        to = await self._begun(begin)
        given_up = threading.Event()
        try:
            digests = await asyncio.to_thread(self._files.write, to, places, weights, given_up)
        except asyncio.CancelledError:
            given_up.set()
            raise
        in_place = digests is not None
        if digests is None:
            digests = await chunks.send(self._client, to.upload, places, weights, self._portion, arrived)
        manifest = described(places, digests)
        commit = CommitPublish(upload=to.upload, manifest=manifest, in_place=in_place, direct=direct)
        return await self._client.ask(commit, RegisterVersionReply, timeout_s=None)

    async def _begun(self, begin: BeginPublish) -> BeginPublishReply:
        """Where the version goes, once there is room: this process must not keep what is deleted."""
        await asyncio.to_thread(self._files.forget_deleted)

        async def forgetting() -> None:
            while True:
                await asyncio.sleep(POLL_INTERVAL_S)
                await asyncio.to_thread(self._files.forget_deleted)

        meanwhile = asyncio.ensure_future(forgetting())
        try:
            return await self._client.ask(begin, BeginPublishReply, timeout_s=None)
        finally:
            meanwhile.cancel()

    def _opened_source(self) -> "DirectSource | None":
        """What gives versions to readers itself, if anything does; opened when there is a first one."""
        if self._direct and self._source is None:
            from staleflow.clients.weights.direct_source import DirectSource

            self._source = DirectSource(self._direct)
        return self._source


async def damaged(server: Client, lineage: Lineage, version: Version) -> bool:
    """Whether the parameter server has lost a version that was published, or found that its bytes are others."""
    status = await server.ask(GetStatus(), Status, timeout_s=None)
    whole = [(one["lineage"], one["version"]) for one in status.values["versions"] if not one["corrupt"]]
    return (lineage, version) not in whole
