"""Real sockets on the product's event loop; every endpoint and client of a test is closed when the test ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq

from staleflow.net.client import Client
from staleflow.net.endpoint import Call, Endpoint
from staleflow.net.limits import TransportLimits
from staleflow.net.zmq_stream import context
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.codec import decode_reply
from staleflow.protocols.wire.messages import Reply

FAST = TransportLimits(heartbeat_s=0.4, retry_s=0.5, retry_cap_s=0.6)
"""Shorter intervals than the defaults, so that a test sees a peer leave soon."""


@pytest.fixture
def ipc(short_dir: Path) -> str:
    return f"ipc://{short_dir}/s"


class RawPeer:
    """A plain ZeroMQ socket that can send arbitrary bytes."""

    def __init__(self, kind: int) -> None:
        self.zmq: zmq.Socket[bytes] = context().socket(kind)
        self.zmq.set(zmq.LINGER, 0)
        self.zmq.set(zmq.RCVTIMEO, 60_000)
        self.zmq.set(zmq.RCVHWM, 0)

    async def hear(self) -> list[bytes]:
        """Return the next message; raise ``zmq.Again`` after a minute."""
        return await asyncio.to_thread(self.zmq.recv_multipart)

    async def ask(self, *parts: bytes) -> tuple[int, Reply]:
        """Send the parts and decode the header of the reply."""
        self.zmq.send_multipart(parts)
        return decode_reply((await self.hear())[0])


@dataclass
class Network:
    """Factory of peers; closes all of them."""

    limits: TransportLimits = FAST
    endpoints: list[Endpoint] = field(default_factory=list[Endpoint])
    clients: list[Client] = field(default_factory=list[Client])
    raw: list[RawPeer] = field(default_factory=list[RawPeer])
    tasks: "list[asyncio.Task[None]]" = field(default_factory=list["asyncio.Task[None]"])

    def endpoint(
        self,
        bind: str,
        on_call: Callable[[Call], None],
        on_gone: Callable[[str], None] | None = None,
        on_drained: Callable[[], None] | None = None,
        on_reject: Callable[[str, Code, str], None] | None = None,
        limits: TransportLimits | None = None,
    ) -> Endpoint:
        """Start an endpoint that serves."""
        endpoint = Endpoint(
            bind,
            on_call=on_call,
            on_gone=on_gone,
            on_drained=on_drained,
            on_reject=on_reject,
            limits=limits or self.limits,
        )
        self.endpoints.append(endpoint)
        self.tasks.append(asyncio.create_task(endpoint.serve()))
        return endpoint

    def client(self, address: str, name: str = "worker-0.1", limits: TransportLimits | None = None) -> Client:
        client = Client(address, worker=WorkerId(name), limits=limits or self.limits)
        self.clients.append(client)
        return client

    def dealer(self, address: str, route: bytes = b"") -> RawPeer:
        """Connect a raw peer to an endpoint, under a generated route unless one is given."""
        peer = RawPeer(zmq.DEALER)
        peer.zmq.set(zmq.ROUTING_ID, route or f"raw-{len(self.raw)}/0".encode())
        self.raw.append(peer)
        peer.zmq.connect(address)
        return peer

    def router(self, address: str) -> RawPeer:
        """Bind a raw peer for a client to connect to."""
        peer = RawPeer(zmq.ROUTER)
        self.raw.append(peer)
        peer.zmq.bind(address)
        return peer

    async def until(self, holds: Callable[[], object]) -> None:
        """Return once the condition holds; raise ``TimeoutError`` after a minute."""
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for client in self.clients:
            client.close()
        for endpoint in self.endpoints:
            endpoint.close()
        for peer in self.raw:
            peer.zmq.close(0)
        await asyncio.gather(*self.tasks)


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    network = Network()
    yield network
    await network.close()
