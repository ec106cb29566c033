"""The reader's side: a verified version in this process's memory, pinned at the server until it is closed."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from staleflow.clients.weights import mapped
from staleflow.clients.weights.external import external_digest
from staleflow.clients.weights.mirror import MirrorReader
from staleflow.clients.weights.relays import Relays, map_near, unpinning
from staleflow.clients.weights.remote import CorruptWeights, Remote, RemoteVersion, unpin, verify
from staleflow.clients.weights.tensors import Tensor, part
from staleflow.configs.errors import ConfigError
from staleflow.net.client import Client
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.transport import SOCKETS, Transport
from staleflow.net.weights import while_alive
from staleflow.process.host import boot_id
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.manifest import check
from staleflow.protocols.wire.messages import GetManifest, Manifest, ManifestReply
from staleflow.protocols.wire.tensors import Array
from staleflow.store.objects import Objects

if TYPE_CHECKING:
    from staleflow.clients.weights.direct_reader import DirectReader

__all__ = ["CorruptWeights", "PulledVersion", "Puller"]

log = logging.getLogger(__name__)

DOUBT_TIMEOUT_S = 60.0
"""Timeout of a full verification by the server."""


class PulledVersion:
    """A version in this process's memory. The server keeps its bytes unchanged until it is closed."""

    def __init__(
        self,
        asked: GetManifest,
        manifest: Manifest,
        data: memoryview,
        release: Callable[[], Coroutine[Any, Any, None]],
        *,
        mapped: bool = False,
        direct: bool = False,
        mirrored: bool = False,
    ) -> None:
        self._release = release
        self.asked = asked
        self._manifest = manifest
        self._data: memoryview | None = data
        self.lineage = asked.lineage
        self.version = asked.version
        self.sha = manifest.sha
        self.nbytes = manifest.nbytes
        self.mapped = mapped
        """True if the bytes are the server's file itself."""
        self.direct = direct
        """True if the bytes came from the trainer directly."""
        self.mirrored = mirrored
        """True if the bytes came from the object store or the shared folder of ``parameters.mirror``."""

    @property
    def way(self) -> str:
        """Source of the bytes, in words for the log."""
        if self.mapped:
            return "mapped"
        if self.mirrored:
            return "from the mirror"
        return "from the trainer" if self.direct else "over the network"

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, as read-only views without a copy."""
        if self._data is None:
            raise ValueError(f"version {self.version} is closed")
        data = self._data
        return {e.name: Tensor(e.name, e.dtype, e.shape, part(data, e)) for e in self._manifest.tensors}

    def arrays(self) -> dict[str, Array]:
        """Return NumPy views by name; float16 and bfloat16 as their bits in uint16."""
        return {name: tensor.array() for name, tensor in self.tensors().items()}

    @property
    def external(self) -> str | None:
        """Digest that the trainer committed in place of weights; None if the weights are here."""
        return external_digest(self.arrays())

    def copy_to(self, model: Any) -> None:
        """Copy every tensor into a ``torch.nn.Module``, in place. Raise ``LoadError`` if they are not its weights."""
        from staleflow.clients.rollout.engines.load_weights import copy_weights

        copy_weights(model, self.arrays())

    async def verify(self) -> None:
        """Raise ``CorruptWeights`` unless every tensor matches its digest. Bytes from the network are verified
        already."""
        if self.mapped and self._data is not None:
            await asyncio.to_thread(verify, self._manifest, self._data)

    async def close(self) -> None:
        """Release the bytes and the pin. Idempotent."""
        if self._data is None:
            return
        self._data = None
        await self._release()

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
        mirror: str = "",
    ) -> None:
        """``deltas``: allow deltas over slow connections. ``direct``: try the trainer first, if it serves direct
        transfers (imports torch). ``mirror``: URL of the run's mirror; read from there on other hosts than the
        server's. Raise ``ConfigError`` if its package is missing."""
        self._client = Client(address, worker=worker, transport=transport)
        self._worker = worker
        self._maps = mapped.Maps()
        self._remote = Remote(deltas=deltas)
        self._relays = Relays(self._client, worker=worker, transport=transport)
        self._direct = _direct_reader(worker) if direct else None
        self._mirror = MirrorReader(Objects(mirror)) if mirror else None

    async def pull(self, lineage: Lineage, version: Version) -> PulledVersion:
        """Return a verified version, pinned for this worker. Waits for a server that is away.

        Raise ``Refused`` if the server has no such version, ``CorruptWeights`` if its bytes do not match the manifest.
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
        """Same as ``pull``, but without verification: call ``verify`` before using the bytes."""
        # A reader on the server's host maps its file, and does not wait for the mirror.
        near = boot_id() if self._mirror is not None else ""
        asked = GetManifest(
            worker=self._worker, lineage=lineage, version=version, host=near, mirror=self._mirror is not None
        )
        reply = await self._client.ask(asked, ManifestReply, timeout_s=None)
        check(reply.manifest)
        if (direct := await self._from_trainer(asked, reply)) is not None:
            return direct
        file = await asyncio.to_thread(self._maps.map, reply)
        if file is None:
            if (mirrored := await self._from_mirror(asked, reply)) is not None:
                return mirrored
            return await self._from_network(asked, reply.manifest)
        return PulledVersion(asked, reply.manifest, file, lambda: unpin(self._client, asked), mapped=True)

    async def _from_trainer(self, asked: GetManifest, reply: ManifestReply) -> PulledVersion | None:
        """Get the version from the trainer; return None if that fails, so that the usual way is tried."""
        if self._direct is None or not reply.direct:
            return None
        data = await asyncio.to_thread(self._direct.take, reply.direct, asked, reply.manifest)
        if isinstance(data, str):
            log.warning("version %d does not come from the trainer: %s", asked.version, data)
            return None
        return PulledVersion(asked, reply.manifest, data, lambda: unpin(self._client, asked), direct=True)

    async def _from_mirror(self, asked: GetManifest, reply: ManifestReply) -> PulledVersion | None:
        """Fetch the version from the mirror; return None if that fails, so that the network is tried."""
        if self._mirror is None or not reply.mirrored or not self._mirror.is_usable():
            return None
        buffer = await self._remote.memory(reply.manifest.nbytes)
        if not await self._mirror.fetch(asked, reply.manifest, memoryview(buffer)):
            return None
        return self._owned(RemoteVersion(self._client, asked, reply.manifest, buffer), mirrored=True)

    async def _doubt(self, asked: GetManifest) -> None:
        """Have the server verify every byte: a version that it finds damaged can be published again."""
        with suppress(Refused, Unavailable):
            doubted = msgspec.structs.replace(asked, doubted=True)
            await self._client.ask(doubted, ManifestReply, timeout_s=DOUBT_TIMEOUT_S)

    async def _from_network(self, asked: GetManifest, manifest: Manifest) -> PulledVersion:
        """Fetch the version through a relay, or else from the server into this process's memory."""
        for relay in await self._relays.nearest():
            try:
                return await self._from_relay(relay, asked, manifest)
            except (Refused, Unavailable, ProtocolError, CorruptWeights, ConfigError) as error:
                log.warning("version %d does not come from the relay %s: %s", asked.version, relay.address, error)
                if isinstance(error, Unavailable):
                    self._relays.cooldowns.add(relay.address, error)
                await unpin(relay, asked)
        try:
            return self._owned(await self._remote.fetch(self._client, asked, manifest))
        except CorruptWeights:
            await self._doubt(asked)
            await unpin(self._client, asked)
            raise
        except Refused:
            await unpin(self._client, asked)
            raise

    async def _from_relay(self, relay: Client, asked: GetManifest, manifest: Manifest) -> PulledVersion:
        """Map the relay's file if it is on this host, else fetch its bytes into memory."""
        file = await while_alive(relay, map_near(relay, asked, manifest))
        if file is None:
            return self._owned(await self._remote.fetch(relay, asked, manifest, watched=True))
        return PulledVersion(asked, manifest, file, unpinning(asked, relay, self._client), mapped=True)

    def _owned(self, fetched: RemoteVersion, *, mirrored: bool = False) -> PulledVersion:
        async def release() -> None:
            await self._remote.release(fetched)
            if fetched.client is not self._client:
                await unpin(self._client, fetched.asked)

        data = memoryview(fetched.buffer).toreadonly()
        return PulledVersion(fetched.asked, fetched.manifest, data, release, mirrored=mirrored)

    def close(self) -> None:
        """Close the connections; the servers then remove the remaining pins. Idempotent."""
        self._maps.close()
        self._relays.close()
        self._client.close()


def _direct_reader(worker: WorkerId) -> "DirectReader":
    from staleflow.clients.weights.direct_reader import DirectReader

    return DirectReader(worker)
