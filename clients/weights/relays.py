"""Reading from relays: a relay is trusted only as far as it agrees with the parameter server."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from staleflow.clients.weights import mapped
from staleflow.clients.weights.remote import CorruptWeights, unpin, verify
from staleflow.net.client import Client
from staleflow.net.transport import Transport
from staleflow.net.weights import SourceCooldowns
from staleflow.process.host import boot_id
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import GetManifest, GetSources, Manifest, ManifestReply, Sources

NEAR_TIMEOUT_S = 60.0
"""Timeout of a relay's reply that a version is stored or arriving."""
REPLY_TIMEOUT_S = 10.0
"""Timeout of a relay's check of bytes that were found damaged."""


class Relays:
    """Connections of one reader to the relays that are assigned to it."""

    def __init__(self, root: Client, *, worker: WorkerId, transport: Transport) -> None:
        self._root = root
        self._worker = worker
        self._transport = transport
        self._open: dict[str, Client] = {}
        self.cooldowns = SourceCooldowns()

    async def nearest(self) -> list[Client]:
        """Return the relays to try before the parameter server, in order of preference."""
        sources = await self._root.ask(GetSources(worker=self._worker, host=boot_id()), Sources, timeout_s=None)
        for endpoint in list(self._open):
            if endpoint not in sources.endpoints:  # gone, or another is nearer; closing also removes the pins there
                self._open.pop(endpoint).close()
        for endpoint in sources.endpoints:
            if endpoint not in self._open:
                self._open[endpoint] = Client(endpoint, worker=self._worker, transport=self._transport)
        return [self._open[endpoint] for endpoint in sources.endpoints if endpoint not in self.cooldowns]

    def close(self) -> None:
        """Close the connections."""
        for client in self._open.values():
            client.close()


async def map_near(relay: Client, asked: GetManifest, manifest: Manifest) -> memoryview | None:
    """Map and verify the relay's file, and pin it there; return None if the relay is on another host and it is only
    pinned.

    Raise ``ProtocolError`` if the relay has other bytes under this name, ``CorruptWeights`` if its file is damaged.
    """
    near = msgspec.structs.replace(asked, host=boot_id())
    while True:
        reply = await relay.ask(near, ManifestReply, timeout_s=NEAR_TIMEOUT_S)
        if reply.manifest.sha != manifest.sha:
            detail = f"{relay.address} has other weights as version {asked.version}; is it a relay of another run?"
            raise ProtocolError(Code.CONFLICT, detail)
        if reply.path or reply.host != near.host:
            break
    if (file := await asyncio.to_thread(mapped.map_file, reply)) is None:
        return None
    try:
        await asyncio.to_thread(verify, manifest, file)
    except CorruptWeights:
        await doubt(relay, asked)
        raise
    return file


async def doubt(relay: Client, asked: GetManifest) -> None:
    """Have the relay verify every byte of a version, and delete the version if it is damaged."""
    await relay.ask(msgspec.structs.replace(asked, doubted=True), ManifestReply, timeout_s=REPLY_TIMEOUT_S)


def unpinning(asked: GetManifest, *clients: Client) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a function that unpins a version at each client."""

    async def release() -> None:
        for client in clients:
            await unpin(client, asked)

    return release
