"""Connections of a relay to its sources: the parameter server, which defines every manifest, and the parent relay, if
any.

The newest version stays pinned at the parameter server, so that the next one can be fetched as a delta.
"""

import asyncio
import logging
from contextlib import suppress

from staleflow.net.client import Client
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.transport import Transport
from staleflow.net.weights import ChunkSizes, DeltaChoice, Pace, Source, SourceCooldowns
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.manifest import check
from staleflow.protocols.wire.messages import Done, GetManifest, Manifest, ManifestReply, Unpin
from staleflow.servers.parameters.versions import VersionKey

log = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 10.0
"""Timeout of a manifest or unpin request to the parameter server or the parent relay."""


class Upstream:
    """Connections of one relay to its sources. Owned by one event loop."""

    def __init__(self, worker: WorkerId, *, bytes_per_s: float, deltas: bool, transport: Transport) -> None:
        self.ways = DeltaChoice(deltas=deltas)
        self.cooldowns = SourceCooldowns()
        self._worker = worker
        self._transport = transport
        self._pace = Pace(bytes_per_s)
        self._chunk_sizes = ChunkSizes()
        self._root: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._above: Client | None = None
        self._newest: VersionKey | None = None

    def begin(self, parameters: str) -> Client:
        """Connect to the parameter server, whose address is known now."""
        root = Client(parameters, worker=self._worker, transport=self._transport)
        self._root.set_result(root)
        return root

    def set_parent(self, endpoints: list[str]) -> None:
        """Connect to the parent relay, if there is one."""
        endpoint = endpoints[0] if endpoints else ""
        if endpoint == self.above:
            return
        log.info("now reading weights from %s", endpoint or "the parameter server")
        if self._above is not None:
            self._above.close()
        self._above = Client(endpoint, worker=self._worker, transport=self._transport) if endpoint else None

    @property
    def above(self) -> str:
        """Endpoint of the parent relay; empty: the parameter server is the only source."""
        return "" if self._above is None else self._above.address

    def close(self) -> None:
        """Close the connections."""
        if self._above is not None:
            self._above.close()
        if self._root.done():
            self._root.result().close()
        self._root.cancel()

    # One version -----------------------------------------------------------------------------------------------------

    async def manifest(self, key: VersionKey) -> Manifest:
        """Return the manifest of the parameter server and pin the version there. Raise ``Refused`` if there is none."""
        root = await asyncio.shield(self._root)
        try:
            reply = await root.ask(self._asked(key), ManifestReply, timeout_s=REPLY_TIMEOUT_S)
        except Unavailable as error:
            raise Refused(
                Code.BAD_VERSION, f"this relay cannot reach the parameter server for {key}: {error}"
            ) from error
        check(reply.manifest)
        return reply.manifest

    def sources(self) -> list[Source]:
        """Return the sources of the bytes in order of preference."""
        direct = self._above is None or self._above.address in self.cooldowns
        clients = [self._root.result()] if self._above is None or direct else [self._above, self._root.result()]
        return [Source(client=client, pace=self._pace, chunk_sizes=self._chunk_sizes) for client in clients]

    async def pin(self, source: Source, key: VersionKey, manifest: Manifest) -> GetManifest:
        """Pin the version at the source, too. Raise ``ProtocolError`` if the source has other bytes under this key."""
        asked = self._asked(key)
        if source.client is not self._root.result():
            reply = await source.client.ask(asked, ManifestReply, timeout_s=REPLY_TIMEOUT_S)
            if reply.manifest.sha != manifest.sha:
                detail = f"{source.client.address} has other weights as {key}; is it a relay of another run?"
                raise ProtocolError(Code.CONFLICT, detail)
        return asked

    async def mark_stored(self, key: VersionKey) -> None:
        """Release the pins of a version that is stored here. The newest version stays pinned at the parameter server
        as a base."""
        older, self._newest = self._newest, key if self._newest is None else max(key, self._newest)
        if self._above is not None:
            await self._unpin(self._above, key)
        if self._newest != key:
            await self.release(key)
            return
        await self._unpin(self._root.result(), key, base=True)
        if older is not None and older != key:
            await self.release(older)

    async def release(self, key: VersionKey) -> None:
        """Unpin a version at the parameter server."""
        await self._unpin(self._root.result(), key)

    async def _unpin(self, client: Client, key: VersionKey, *, base: bool = False) -> None:
        with suppress(Refused, Unavailable):
            ask = Unpin(worker=self._worker, lineage=key.lineage, version=key.version, base=base)
            await client.ask(ask, Done, timeout_s=REPLY_TIMEOUT_S)

    def _asked(self, key: VersionKey) -> GetManifest:
        return GetManifest(worker=self._worker, lineage=key.lineage, version=key.version)
