"""Weights in a reader's memory outlive a server that does not answer."""

import asyncio
from collections.abc import Sequence

import pytest

from staleflow.clients.weights.remote import Remote
from staleflow.net.client import Client
from staleflow.net.errors import Unavailable
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.delta import encode
from staleflow.protocols.wire.manifest import digest, lay_out
from staleflow.protocols.wire.messages import (
    Chunk,
    Done,
    GetChunk,
    GetDelta,
    GetManifest,
    Manifest,
    Ping,
    Pong,
    Reply,
    Request,
)

DATA = [bytes([version]) * 4000 for version in range(2)]
READER = WorkerId("reader.1")


def manifest_of(version: int) -> Manifest:
    return lay_out([("layer", "int32", (1000,), digest(DATA[version]))])


def asked_for(version: int) -> GetManifest:
    return GetManifest(worker=READER, lineage=Lineage(0), version=Version(version))


class Server(Client):
    """A server that has both versions, without a network; no answer arrives once ``is_gone`` is set."""

    def __init__(self, address: str) -> None:
        super().__init__(address, worker=READER)
        self.is_gone = False
        self.asked = list[type]()

    async def call(
        self, body: Request, frames: Sequence[Data] = (), *, timeout_s: float | None = 30.0
    ) -> tuple[Reply, list[memoryview]]:
        if self.is_gone and timeout_s is not None:
            raise Unavailable(self.address, timeout_s)
        if self.is_gone:
            await asyncio.Event().wait()
        self.asked.append(type(body))
        match body:
            case Ping():
                return Pong(), []
            case GetChunk(version=version, offset=offset, nbytes=nbytes):
                return Chunk(offset=offset), [memoryview(DATA[version])[offset : offset + nbytes]]
            case GetDelta(offset=offset, nbytes=nbytes, width=width):
                end = offset + nbytes
                return Chunk(offset=offset), [memoryview(encode(DATA[0][offset:end], DATA[1][offset:end], width))]
            case _:
                return Done(), []


async def test_the_base_is_still_one_after_a_relay_that_gave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staleflow.net.weights.DELTA_MAX_BYTES_PER_S", float("inf"))
    remote, relay, root = Remote(), Server("tcp://127.0.0.1:1"), Server("tcp://127.0.0.1:2")
    await remote.release(await remote.fetch(relay, asked_for(0), manifest_of(0), watched=True))
    relay.is_gone = True
    with pytest.raises(Unavailable):
        await remote.fetch(relay, asked_for(1), manifest_of(1), watched=True)
    brought = await remote.fetch(root, asked_for(1), manifest_of(1))
    assert bytes(brought.buffer[: len(DATA[1])]) == DATA[1]
    assert GetDelta in root.asked
    assert GetChunk not in root.asked
