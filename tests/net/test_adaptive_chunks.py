"""The number of bytes sent over a connection at once adapts to the time of its answers."""

import asyncio

import pytest

from staleflow.net import adaptive_chunks as portions
from staleflow.net.adaptive_chunks import FIRST_BYTES, LATE_S, MIN_BYTES, QUICK_S, AdaptiveChunk, Stuck
from staleflow.net.client import Client
from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Done, GetStatus
from tests.net.conftest import Network

MOST = 4 << 20


def test_it_doubles_with_each_quick_answer_of_its_size_up_to_the_most() -> None:
    portion = AdaptiveChunk(MOST)
    sizes: list[int] = []
    while portion.nbytes < MOST:
        sizes.append(portion.nbytes)
        portion.took(portion.nbytes, QUICK_S)
    assert sizes == [FIRST_BYTES << n for n in range(4)]
    portion.took(MOST, 0.0)
    assert portion.nbytes == MOST


def test_answers_to_less_make_it_no_larger() -> None:
    portion = AdaptiveChunk(MOST)
    portion.took(FIRST_BYTES, 0.0)
    for _ in range(3):
        portion.took(FIRST_BYTES, 0.0)  # was already in flight
    assert portion.nbytes == 2 * FIRST_BYTES
    portion.took(FIRST_BYTES + 1, 0.0)  # as many groups as fitted
    assert portion.nbytes == 4 * FIRST_BYTES


def test_it_halves_once_for_all_that_was_under_way_and_not_below_the_least() -> None:
    portion = AdaptiveChunk(MOST)
    portion.nbytes = MOST
    for _ in range(4):
        portion.took(MOST, 2 * LATE_S)
    assert portion.nbytes == MOST // 2
    for _ in range(20):
        portion.took(portion.nbytes, 2 * LATE_S)
    assert portion.nbytes == MIN_BYTES
    portion.took(MIN_BYTES, (QUICK_S + LATE_S) / 2)
    assert portion.nbytes == MIN_BYTES


def test_the_most_may_be_less_than_what_is_usually_the_least() -> None:
    portion = AdaptiveChunk(50)
    portion.took(50, 2 * LATE_S)
    portion.took(50, 0.0)
    assert portion.nbytes == 50


async def test_what_does_not_even_let_a_ping_through_is_stuck_unless_it_cannot_be_less(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portions, "LATE_S", 0.01)
    monkeypatch.setattr(portions, "PONG_S", 0.1)
    client = Client("tcp://127.0.0.1:9", worker=WorkerId("reader.1"))
    network.clients.append(client)
    portion = AdaptiveChunk(MOST)

    def asked() -> "asyncio.Task[Done]":
        call = client.ask(GetStatus(), Done, timeout_s=None)
        return asyncio.ensure_future(portion.carry(client, call, portion.nbytes))

    with pytest.raises(Stuck):
        await asked()
    assert portion.nbytes == MIN_BYTES
    least = asked()
    whole = client.ask(GetStatus(), Done, timeout_s=None)
    one_group = asyncio.ensure_future(portion.carry(client, whole, MOST, divisible=False))
    done, waiting = await asyncio.wait((least, one_group), timeout=0.5)
    assert (done, waiting) == (set(), {least, one_group})
    for task in waiting:
        task.cancel()


async def test_a_server_that_has_no_answer_yet_is_waited_for(
    network: Network, ipc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portions, "LATE_S", 0.01)
    monkeypatch.setattr(portions, "PONG_S", 30.0)
    kept: list[Call] = []
    network.endpoint(ipc, kept.append)
    client, portion = network.client(ipc), AdaptiveChunk(MOST)
    call = client.ask(GetStatus(), Done, timeout_s=None)
    carrying = asyncio.ensure_future(portion.carry(client, call, FIRST_BYTES))
    await network.until(lambda: kept)
    _, waiting = await asyncio.wait((carrying,), timeout=0.5)
    assert waiting
    kept[0].reply(Done())
    assert await carrying == Done()
    # one request, which its client sends again after ``retry_s``
    assert ({call.id for call in kept}, portion.nbytes) == ({kept[0].id}, FIRST_BYTES // 2)
