"""Bytes of versions over connections: which way pays, and how fast they may come."""

import asyncio

import pytest

from staleflow.protocols.consistency.ids import WorkerId
from staleflow.runtime import weights
from staleflow.runtime.client import Client
from staleflow.runtime.errors import Unavailable
from staleflow.runtime.transport import SOCKETS
from staleflow.runtime.weights import Pace, Ways, while_alive


def test_the_faster_way_is_taken_again() -> None:
    ways = Ways(deltas=True)
    assert not ways.delta_pays
    ways.whole_took(1_000, 1.0)
    assert ways.delta_pays
    ways.delta_took(1_000, 2.0)
    assert not ways.delta_pays
    ways.whole_took(1_000, 3.0)
    assert ways.delta_pays


def test_a_fast_link_and_a_reader_that_wants_none_get_no_delta() -> None:
    fast, unwilling = Ways(deltas=True), Ways(deltas=False)
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
    assert clock() - began < 1.0


async def test_work_that_waits_for_a_server_that_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SILENT_S", 0.1)
    client = Client("tcp://127.0.0.1:9", worker=WorkerId("reader.1"), transport=SOCKETS)
    try:
        with pytest.raises(Unavailable):
            await while_alive(client, asyncio.sleep(60))
        assert await while_alive(client, asyncio.sleep(0, "done")) == "done"
    finally:
        client.close()
