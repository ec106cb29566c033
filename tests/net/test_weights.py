"""Bytes of versions take the faster way over connections, and no faster than the configured pace."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from staleflow.net import adaptive_chunks as portions
from staleflow.net import weights
from staleflow.net.client import Client
from staleflow.net.errors import Unavailable
from staleflow.net.transport import SOCKETS
from staleflow.net.weights import CHUNK_BYTES, ByteCounter, ChunkSizes, DeltaChoice, Pace, Source, while_alive, whole
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import Chunk, GetChunk, GetManifest, Reply, Request


def test_the_faster_way_is_taken_again() -> None:
    ways = DeltaChoice(deltas=True)
    assert not ways.delta_pays
    ways.whole_took(1_000, 1.0)
    assert ways.delta_pays
    ways.delta_took(1_000, 2.0)
    assert not ways.delta_pays
    ways.whole_took(1_000, 3.0)
    assert ways.delta_pays


def test_a_fast_link_and_a_reader_that_wants_none_get_no_delta() -> None:
    fast, unwilling = DeltaChoice(deltas=True), DeltaChoice(deltas=False)
    fast.whole_took(2 * 10**9, 1.0)
    unwilling.whole_took(1_000, 1.0)
    assert not fast.delta_pays
    assert not unwilling.delta_pays


async def test_a_pace_bounds_the_bytes_of_a_second() -> None:
    pace, clock = Pace(1e6), asyncio.get_running_loop().time
    began = clock()
    for _ in range(5):
        await pace.take(50_000)
    assert clock() - began >= 0.19  # the fifth waits for the four before it
    free, began = Pace(), clock()
    for _ in range(1_000):
        await free.take(1 << 30)
    assert clock() - began < 60.0


async def test_work_that_waits_for_a_server_that_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PING_TIMEOUT_S", 0.1)
    client = Client("tcp://127.0.0.1:9", worker=WorkerId("reader.1"), transport=SOCKETS)
    try:
        with pytest.raises(Unavailable):
            await while_alive(client, asyncio.sleep(60))
        assert await while_alive(client, asyncio.sleep(0, "done")) == "done"
    finally:
        client.close()


ADDRESS = "tcp://127.0.0.1:9"
ASKED = GetManifest(worker=WorkerId("reader.1"), lineage=Lineage(0), version=Version(0))
DATA = bytes(range(256)) * (8 * CHUNK_BYTES // 256)


class Link(Client):
    """Connection to a server of ``DATA``. Drops answers of more than ``most`` bytes, and every pong."""

    def __init__(self, most: int = 1 << 30) -> None:
        super().__init__(ADDRESS, worker=ASKED.worker)
        self.most = most
        self.asked: list[int] = []

    async def call(
        self, body: Request, frames: Sequence[Any] = (), *, timeout_s: float | None = 30.0
    ) -> tuple[Reply, list[memoryview]]:
        if not isinstance(body, GetChunk):
            raise Unavailable(ADDRESS, 0.0)
        self.asked.append(body.nbytes)
        await asyncio.sleep(0 if body.nbytes <= self.most else 3600)
        return Chunk(offset=body.offset), [memoryview(DATA)[body.offset : body.offset + body.nbytes]]


async def brought(link: Link, chunk_sizes: ChunkSizes) -> bytes:
    target = bytearray(len(DATA))
    source = Source(client=link, pace=Pace(), chunk_sizes=chunk_sizes)
    await whole(source, ASKED, [(0, len(DATA))], memoryview(target), ByteCounter())
    return bytes(target)


async def test_pieces_grow_to_the_largest_within_a_version_and_the_next_one_begins_with_those(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(portions, "QUICK_S", 60.0)
    link, learned = Link(), ChunkSizes()
    assert await brought(link, learned) == DATA
    assert link.asked[0] < CHUNK_BYTES == max(link.asked)
    assert len(link.asked) < 25
    link.asked.clear()
    assert await brought(link, learned) == DATA
    assert link.asked == [CHUNK_BYTES] * 8


async def test_what_a_link_no_longer_carries_is_asked_for_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "LATE_S", 0.01)
    monkeypatch.setattr(portions, "QUICK_S", -1.0)
    link, learned = Link(), ChunkSizes()
    learned.whole.nbytes = CHUNK_BYTES
    link.most = CHUNK_BYTES // 4
    async with asyncio.timeout(20):
        assert await brought(link, learned) == DATA
    assert link.asked[:4] == [CHUNK_BYTES] * 4
    assert max(link.asked[4:]) <= link.most
