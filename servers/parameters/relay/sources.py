"""Where a relay gets its bytes: the parameter server, which says what they are, and the relay above, if there is one.

The newest version stays pinned at the parameter server, so that the next one can come as what changed since.
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

ANSWER_S = 10.0
"""In which the parameter server, and the relay above, must say what they have."""


class Upstream:
    """The connections of one relay towards the parameter server. Belongs to one loop."""

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
        """The parameter server's address is known."""
        root = Client(parameters, worker=self._worker, transport=self._transport)
        self._root.set_result(root)
        return root

    def hang_below(self, endpoints: list[str]) -> None:
        """The place in the tree: the relay above, if any."""
        endpoint = endpoints[0] if endpoints else ""
        if endpoint == self.above:
            return
        log.info("bytes come from %s", endpoint or "the parameter server")
        if self._above is not None:
            self._above.close()
        self._above = Client(endpoint, worker=self._worker, transport=self._transport) if endpoint else None

    @property
    def above(self) -> str:
        """Endpoint of the relay above; empty: the parameter server itself."""
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
        """What the version is, by the word of the parameter server; pinned there. ``Refused`` if there is none."""
        root = await asyncio.shield(self._root)
        try:
            found = await root.ask(self._asked(key), ManifestReply, timeout_s=ANSWER_S)
        except Unavailable as error:
            raise Refused(Code.BAD_VERSION, f"this relay cannot ask for {key}: {error}") from error
        check(found.manifest)
        return found.manifest

    def sources(self) -> list[Source]:
        """Whom to ask for its bytes, in this order."""
        shuns = self._above is None or self._above.address in self.cooldowns
        clients = [self._root.result()] if self._above is None or shuns else [self._above, self._root.result()]
        return [Source(client=client, pace=self._pace, chunk_sizes=self._chunk_sizes) for client in clients]

    async def pin(self, source: Source, key: VersionKey, manifest: Manifest) -> GetManifest:
        """Pinned at the source, too. ``ProtocolError`` when it has other bytes by that name."""
        asked = self._asked(key)
        if source.client is not self._root.result():
            theirs = await source.client.ask(asked, ManifestReply, timeout_s=ANSWER_S)
            if theirs.manifest.sha != manifest.sha:
                detail = f"{source.client.address} calls other weights {key}: is it a relay of another run?"
                raise ProtocolError(Code.CONFLICT, detail)
        return asked

    async def has(self, key: VersionKey) -> None:
        """The version is here. If it is the newest it stays pinned, instead of the one that was."""
        older, self._newest = self._newest, key if self._newest is None else max(key, self._newest)
        if self._above is not None:
            await self._unpin(self._above, key)
        if self._newest != key:
            await self.let_go(key)
            return
        await self._unpin(self._root.result(), key, base=True)
        if older is not None and older != key:
            await self.let_go(older)

    async def let_go(self, key: VersionKey) -> None:
        """Nothing of the version is needed any more."""
        await self._unpin(self._root.result(), key)

    async def _unpin(self, client: Client, key: VersionKey, *, base: bool = False) -> None:
        with suppress(Refused, Unavailable):
            ask = Unpin(worker=self._worker, lineage=key.lineage, version=key.version, base=base)
            await client.ask(ask, Done, timeout_s=ANSWER_S)

    def _asked(self, key: VersionKey) -> GetManifest:
        return GetManifest(worker=self._worker, lineage=key.lineage, version=key.version)
