"""The relay that a reader was sent to, and what it gives: believed as far as it agrees with the parameter server."""

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

NEAR_S = 60.0
"""In which a relay must say that a version is there, or still comes."""
ANSWER_S = 10.0
"""In which the parameter server must name a relay, and a relay look at bytes that were found damaged."""


class Relays:
    """Connections of one reader to the relays that it is sent to, one after another."""

    def __init__(self, root: Client, *, worker: WorkerId, transport: Transport) -> None:
        self._root = root
        self._worker = worker
        self._transport = transport
        self._open: dict[str, Client] = {}
        self.cooldowns = SourceCooldowns()

    async def nearest(self) -> list[Client]:
        """Whom to ask before the parameter server itself, in this order."""
        found = await self._root.ask(GetSources(worker=self._worker, host=boot_id()), Sources, timeout_s=None)
        for endpoint in list(self._open):
            if endpoint not in found.endpoints:  # gone, or another is nearer: what is pinned there goes with it
                self._open.pop(endpoint).close()
        for endpoint in found.endpoints:
            if endpoint not in self._open:
                self._open[endpoint] = Client(endpoint, worker=self._worker, transport=self._transport)
        return [self._open[endpoint] for endpoint in found.endpoints if endpoint not in self.cooldowns]

    def close(self) -> None:
        """Close the connections."""
        for client in self._open.values():
            client.close()


async def map_near(relay: Client, asked: GetManifest, manifest: Manifest) -> memoryview | None:
    """The relay's file, whole and verified, and pinned there; None when it is on another host, and only pinned.

    ``ProtocolError`` when the relay has other bytes by that name, ``CorruptWeights`` when its file is damaged.
    """
    near = msgspec.structs.replace(asked, host=boot_id())
    while True:
        found = await relay.ask(near, ManifestReply, timeout_s=NEAR_S)
        if found.manifest.sha != manifest.sha:
            detail = f"{relay.address} calls other weights version {asked.version}: is it a relay of another run?"
            raise ProtocolError(Code.CONFLICT, detail)
        if found.path or found.host != near.host:
            break
    if (file := await asyncio.to_thread(mapped.map_file, found)) is None:
        return None
    try:
        await asyncio.to_thread(verify, manifest, file)
    except CorruptWeights:
        await doubt(relay, asked)
        raise
    return file


async def doubt(relay: Client, asked: GetManifest) -> None:
    """Have the relay look at every byte of a version, and forget it if that is damaged."""
    await relay.ask(msgspec.structs.replace(asked, doubted=True), ManifestReply, timeout_s=ANSWER_S)


def unpinning(asked: GetManifest, *clients: Client) -> Callable[[], Coroutine[Any, Any, None]]:
    """What lets go of a version at each of them."""

    async def let_go() -> None:
        for client in clients:
            await unpin(client, asked)

    return let_go
