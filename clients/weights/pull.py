"""The reader's side: a version in this process's memory, verified, and pinned at the server until it is closed."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from staleflow.clients.weights import mapped
from staleflow.clients.weights.relays import Relays, map_near, unpinning
from staleflow.clients.weights.remote import Brought, CorruptWeights, Remote, unpin, verify
from staleflow.clients.weights.tensors import Tensor, part
from staleflow.configs.errors import ConfigError
from staleflow.net.client import Client
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.transport import SOCKETS, Transport
from staleflow.net.weights import while_alive
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.manifest import check
from staleflow.protocols.wire.messages import GetManifest, Manifest, ManifestReply
from staleflow.protocols.wire.tensors import Array

if TYPE_CHECKING:
    from staleflow.clients.weights.direct_reader import DirectReader

__all__ = ["CorruptWeights", "PulledVersion", "Puller"]

log = logging.getLogger(__name__)

DOUBT_TIMEOUT_S = 60.0
"""In which the server reads a whole version."""


class PulledVersion:
    """A version in this process's memory. Its bytes stay as they are, kept by the server, until it is closed."""

    def __init__(
        self,
        asked: GetManifest,
        manifest: Manifest,
        data: memoryview,
        let_go: Callable[[], Coroutine[Any, Any, None]],
        *,
        mapped: bool = False,
        direct: bool = False,
    ) -> None:
        self._let_go = let_go
        self.asked = asked
        self._manifest = manifest
        self._data: memoryview | None = data
        self.lineage = asked.lineage
        self.version = asked.version
        self.sha = manifest.sha
        self.nbytes = manifest.nbytes
        self.mapped = mapped
        """True when the bytes are the server's file itself."""
        self.direct = direct
        """True when they came from the trainer itself."""

    @property
    def way(self) -> str:
        """How the bytes came, in words."""
        if self.mapped:
            return "mapped"
        return "from the trainer" if self.direct else "over the network"

    def tensors(self) -> dict[str, Tensor]:
        """By name; the bytes are read-only views, nothing is copied."""
        if self._data is None:
            raise ValueError(f"version {self.version} is closed")
        data = self._data
        return {e.name: Tensor(e.name, e.dtype, e.shape, part(data, e)) for e in self._manifest.tensors}

    def arrays(self) -> dict[str, Array]:
        """The same for NumPy; float16 and bfloat16 as their bits in uint16."""
        return {name: tensor.array() for name, tensor in self.tensors().items()}

    async def verify(self) -> None:
        """``CorruptWeights`` unless every tensor is what its digest says. Bytes that came over the network are."""
        if self.mapped and self._data is not None:
            await asyncio.to_thread(verify, self._manifest, self._data)

    async def close(self) -> None:
        """Let go of the bytes and of the pin. May be called again."""
        if self._data is None:
            return
        self._data = None
        await self._let_go()

    async def __aenter__(self) -> "PulledVersion":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Puller:
    """A reader's connection to the parameter server."""

    def __init__(
        self,
        address: str,
        *,
        worker: WorkerId,
        transport: Transport = SOCKETS,
        deltas: bool = True,
        direct: bool = False,
    ) -> None:
        """``deltas``: whether a version may come as what changed since the one before, where the link is slow.
        ``direct``: whether it is asked of the trainer first, where that gives it (imports torch)."""
        self._client = Client(address, worker=worker, transport=transport)
        self._worker = worker
        self._maps = mapped.Maps()
        self._remote = Remote(deltas=deltas)
        self._relays = Relays(self._client, worker=worker, transport=transport)
        self._direct = _direct_reader(worker) if direct else None

    async def pull(self, lineage: Lineage, version: Version) -> PulledVersion:
        """A verified version, pinned for this worker. Waits for a server that is away.

        ``Refused`` if the server has no such version, ``CorruptWeights`` if its bytes are not those of the manifest.
        """
        pulled = await self.reach(lineage, version)
        try:
            await pulled.verify()
        except CorruptWeights:
            await self._doubt(pulled.asked)
            await pulled.close()
            raise
        return pulled

    async def reach(self, lineage: Lineage, version: Version) -> PulledVersion:
        """As ``pull``, but nothing may be made of the bytes before ``verify`` has looked at them."""
        asked = GetManifest(worker=self._worker, lineage=lineage, version=version)
        found = await self._client.ask(asked, ManifestReply, timeout_s=None)
        check(found.manifest)
        if (given := await self._given(asked, found)) is not None:
            return given
        file = await asyncio.to_thread(self._maps.map, found)
        if file is None:
            return await self._brought(asked, found.manifest)
        return PulledVersion(asked, found.manifest, file, lambda: unpin(self._client, asked), mapped=True)

    async def _given(self, asked: GetManifest, found: ManifestReply) -> PulledVersion | None:
        """By the trainer itself; None when it does not, and the bytes are to be had as always."""
        if self._direct is None or not found.direct:
            return None
        data = await asyncio.to_thread(self._direct.take, found.direct, asked, found.manifest)
        if isinstance(data, str):
            log.warning("version %d does not come from the trainer: %s", asked.version, data)
            return None
        return PulledVersion(asked, found.manifest, data, lambda: unpin(self._client, asked), direct=True)

    async def _doubt(self, asked: GetManifest) -> None:
        """Have the server look at every byte: what it finds damaged can be published again."""
        with suppress(Refused, Unavailable):
            doubted = msgspec.structs.replace(asked, doubted=True)
            await self._client.ask(doubted, ManifestReply, timeout_s=DOUBT_TIMEOUT_S)

    async def _brought(self, asked: GetManifest, manifest: Manifest) -> PulledVersion:
        """Through a relay, or else into this process's own memory."""
        for relay in await self._relays.nearest():
            try:
                return await self._through(relay, asked, manifest)
            except (Refused, Unavailable, ProtocolError, CorruptWeights, ConfigError) as error:
                log.warning("version %d does not come from the relay %s: %s", asked.version, relay.address, error)
                if isinstance(error, Unavailable):
                    self._relays.cooldowns.add(relay.address, error)
                await unpin(relay, asked)
        try:
            return self._owned(await self._remote.bring(self._client, asked, manifest))
        except CorruptWeights:
            await self._doubt(asked)
            await unpin(self._client, asked)
            raise
        except Refused:
            await unpin(self._client, asked)
            raise

    async def _through(self, relay: Client, asked: GetManifest, manifest: Manifest) -> PulledVersion:
        """The relay's file where that is on this host, else its bytes in memory."""
        file = await while_alive(relay, map_near(relay, asked, manifest))
        if file is None:
            return self._owned(await self._remote.bring(relay, asked, manifest, watched=True))
        return PulledVersion(asked, manifest, file, unpinning(asked, relay, self._client), mapped=True)

    def _owned(self, brought: Brought) -> PulledVersion:
        async def let_go() -> None:
            await self._remote.let_go(brought)
            if brought.client is not self._client:
                await unpin(self._client, brought.asked)

        data = memoryview(brought.buffer).toreadonly()
        return PulledVersion(brought.asked, brought.manifest, data, let_go)

    def close(self) -> None:
        """Close the connections; the servers free what is still pinned. May be called again."""
        self._maps.close()
        self._relays.close()
        self._client.close()


def _direct_reader(worker: WorkerId) -> "DirectReader":
    from staleflow.clients.weights.direct_reader import DirectReader

    return DirectReader(worker)
