"""Hostile or broken relays and readers do not keep other readers from their bytes."""

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from staleflow.clients.weights import relays
from staleflow.configs.errors import ConfigError
from staleflow.net import weights
from staleflow.net.client import Client
from staleflow.net.endpoint import Call
from staleflow.net.limits import TransportLimits
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.messages import Chunk, GetDelta, GetManifest, JoinRelays, ManifestReply
from staleflow.servers import runner as attached
from staleflow.servers.parameters import tree, turns, versions
from staleflow.servers.parameters.deltas import Deltas
from staleflow.servers.parameters.pins import MAX_OF_ONE, MAX_PER_KEY, Pins
from staleflow.servers.parameters.relay import sources as relay_sources
from staleflow.servers.parameters.relay.arrivals import Arrivals
from staleflow.servers.parameters.relay.service import RelayService
from staleflow.servers.parameters.service import ParameterService
from staleflow.servers.parameters.versions import Stored, VersionKey, Versions
from staleflow.servers.runner import Handled
from tests.servers.parameters.relay.growing import RELAY_HOST, Grown, chunk, manifest_of, pulled, same
from tests.servers.running import GIVE_UP_S, Run

pytestmark = pytest.mark.usefixtures("hosts")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "SHUTDOWN_TIMEOUT_S", 0.1)  # do not wait for calls that never end


def key(version: int) -> VersionKey:
    return VersionKey(Lineage(0), Version(version))


# Relays --------------------------------------------------------------------------------------------------------------


async def test_a_relay_that_answers_pings_and_gives_nothing_is_left(
    grown: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "STALL_TIMEOUT_S", 0.5)
    await grown.grow("relay-0")

    asked: list[VersionKey] = []

    async def never(self: Arrivals, of: VersionKey, *_: Any) -> bytes:
        asked.append(of)
        await asyncio.sleep(3600)
        return b""

    monkeypatch.setattr(Arrivals, "read", never)
    same((await asyncio.wait_for(pulled(grown.reader()), GIVE_UP_S))[0])
    assert asked, "void: it was never asked"


async def test_a_relay_that_gives_a_byte_at_a_time_is_left(grown: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "STALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(weights, "MIN_BYTES", 200_000)
    await grown.grow("relay-0")
    read, asked = Arrivals.read, list[VersionKey]()

    async def drip(self: Arrivals, of: VersionKey, offset: int, nbytes: int) -> Data:
        asked.append(of)
        await asyncio.sleep(0.02)
        return await read(self, of, offset, min(nbytes, 1))

    monkeypatch.setattr(Arrivals, "read", drip)
    same((await asyncio.wait_for(pulled(grown.reader()), GIVE_UP_S))[0])
    assert asked, "void: it was never asked"


async def test_a_relay_on_this_host_that_says_nothing_of_a_version_is_left(
    grown: Grown, hosts: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts(RELAY_HOST)
    monkeypatch.setattr(relays, "NEAR_TIMEOUT_S", 0.5)
    await grown.grow("relay-0")

    asked: list[object] = []

    async def never(*what: Any) -> ManifestReply:
        asked.append(what)
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(RelayService, "_arrived_manifest", never)
    same((await asyncio.wait_for(pulled(grown.reader()), GIVE_UP_S))[0])
    assert asked, "void: it was never asked"


async def test_a_relay_that_names_a_pipe_as_its_file_stops_no_reader(
    grown: Grown, hosts: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    hosts(RELAY_HOST)
    os.mkfifo(short_dir / "pipe")
    await grown.grow("relay-0")

    asked: list[object] = []

    async def pipe(*what: Any, **_: Any) -> str:
        asked.append(what)
        return str(short_dir / "pipe")

    monkeypatch.setattr(RelayService, "_path", pipe)
    same((await asyncio.wait_for(pulled(grown.reader()), GIVE_UP_S))[0])
    assert asked, "void: it was never asked"


async def test_a_relay_of_another_staleflow_ends_no_reader(grown: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    await grown.grow("relay-0")

    asked: list[object] = []

    async def foreign(*what: Any) -> Any:
        asked.append(what)
        raise ConfigError("protocol of tcp://10.0.0.1:1", 99, "this client speaks 1")

    monkeypatch.setattr("staleflow.clients.weights.pull.map_near", foreign)
    same((await pulled(grown.reader()))[0])
    assert asked, "void: it was never asked"


async def test_a_relay_below_one_that_gives_nothing_has_its_bytes_from_the_parameter_server(
    grown: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "STALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(weights, "MIN_BYTES", 1)
    monkeypatch.setattr(tree, "FANOUT", 1)
    for name in ("relay-0", "relay-1"):
        await grown.grow(name)
    read = Arrivals.read

    async def of_the_lower_only(self: Arrivals, of: VersionKey, offset: int, nbytes: int) -> Data:
        if not self._upstream.above:  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(3600)
        return await read(self, of, offset, nbytes)

    monkeypatch.setattr(Arrivals, "read", of_the_lower_only)
    client = await grown.client("relay-1")
    got, size = 0, (await client.ask(manifest_of(0), ManifestReply)).manifest.nbytes
    while got < size:
        _, frames = await client.call(chunk(got, size), timeout_s=GIVE_UP_S)
        got += frames[0].nbytes


@pytest.mark.parametrize("most", [8, 10**6], ids=["some wait", "all that can wait do"])
async def test_a_relay_that_is_flooded_with_questions_about_nothing_stays(
    grown: Grown, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(turns, "MAX_MANIFESTS", most)
    monkeypatch.setattr(relay_sources, "REPLY_TIMEOUT_S", 1.0)
    monkeypatch.setattr(relay_sources, "Client", partial(Client, limits=TransportLimits(max_pending=16)))
    handle = ParameterService.handle
    joined = asyncio.Event()

    def silent(self: ParameterService, call: Call) -> Handled:
        if isinstance(call.body, JoinRelays):
            joined.set()
        unanswered = isinstance(call.body, GetManifest) and call.body.version >= 100
        return None if unanswered else handle(self, call)

    monkeypatch.setattr(ParameterService, "handle", silent)
    await grown.grow("relay-0")
    client = await grown.client("relay-0")
    flood = [client.ask(manifest_of(version), ManifestReply, timeout_s=1.0) for version in range(100, 1100)]
    refused = asyncio.gather(*flood, return_exceptions=True)
    same((await asyncio.wait_for(pulled(grown.reader()), GIVE_UP_S))[0])
    await refused
    joined.clear()
    await asyncio.wait_for(joined.wait(), GIVE_UP_S)  # it still reports that it is alive


# Readers -------------------------------------------------------------------------------------------------------------


def test_one_worker_pins_a_few_versions_at_once_and_the_oldest_goes_first() -> None:
    pins = Pins()
    pins.add("honest", key(3))
    for version in range(10_000):
        pins.add("greedy", key(version))
    assert [version for version in range(10_000) if "greedy" in pins.of(key(version))] == [
        *range(10_000 - MAX_OF_ONE, 10_000)
    ]
    assert pins.in_use(key(3))
    pins.add("greedy", key(10_000 - MAX_OF_ONE))  # requested again: the pin before it is now the oldest
    pins.add("greedy", key(20_000))
    assert pins.of(key(10_000 - MAX_OF_ONE)) == ("greedy",)


def test_workers_of_one_key_pin_a_few_versions_at_once_whatever_their_names_are() -> None:
    pins = Pins()
    pins.add("honest", key(3), "rollout/honest")
    for version in range(160):
        pins.add(f"evil.{version // 16}", key(version), "rollout/box")
    assert [version for version in range(160) if pins.in_use(key(version))] == [3, *range(160 - MAX_PER_KEY, 160)]
    assert pins.of(key(3)) == ("honest",)
    pins.add("evil.0", key(3), "rollout/box")
    for worker in range(10):
        pins.forget(f"evil.{worker}")
    assert [version for version in range(160) if pins.in_use(key(version))] == [3]
    pins.forget("honest")
    assert [*pins._of, *pins._owners, *pins._by_owner] == []  # pyright: ignore[reportPrivateUsage]


async def test_doubts_without_end_cost_one_look_at_a_time_and_keep_nobody_waiting(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, {"w": np.zeros(1000, np.float32)})
    looks, verify = 0, versions._verify  # pyright: ignore[reportPrivateUsage]

    def slow(*both: Any) -> None:
        nonlocal looks
        looks += 1
        time.sleep(0.05)
        verify(*both)

    monkeypatch.setattr(versions, "_verify", slow)
    doubter = run.client(run.where.parameters, WorkerId("doubter.1"))
    ask = GetManifest(worker=WorkerId("doubter.1"), lineage=Lineage(0), version=Version(0), doubted=True)
    asking = [doubter.ask(ask, ManifestReply, timeout_s=None) for _ in range(200)]
    doubts = asyncio.gather(*asking)
    await asyncio.sleep(0)
    honest = run.client(run.where.parameters, WorkerId("reader.1"))
    await honest.ask(manifest_of(0), ManifestReply)
    await doubts
    assert 1 <= looks < 20  # one verification at a time, each for all doubts that arrived meanwhile


async def test_a_peer_that_asks_for_thousands_of_pieces_keeps_nobody_waiting(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, {"w": np.zeros(1000, np.float32)})
    loop, begun, reads, read = asyncio.get_running_loop(), asyncio.Event(), 0, Versions.read

    def slow(self: Versions, *what: Any) -> bytes:
        nonlocal reads
        reads += 1
        if reads == 20:
            loop.call_soon_threadsafe(begun.set)
        time.sleep(0.005)
        return read(self, *what)

    greedy, honest = (run.client(run.where.parameters, WorkerId(name)) for name in ("greedy.1", "reader.1"))
    await honest.call(chunk(0, 100))  # it is connected before the flood begins
    monkeypatch.setattr(Versions, "read", slow)
    flood = asyncio.gather(*(greedy.call(chunk(0, 100), timeout_s=2.0) for _ in range(1000)), return_exceptions=True)
    await begun.wait()
    reply, _ = await honest.call(chunk(0, 100))
    assert (reply, reads < 3 * turns.MAX_PIECES) == (Chunk(offset=0), True)
    greedy.close()
    await flood


async def test_nothing_is_kept_of_a_delta_that_was_asked_for_again(tmp_path: Path) -> None:
    deltas = Deltas(Versions(tmp_path, durability="process"), "raw")
    ask = GetDelta(
        lineage=Lineage(0),
        version=Version(1),
        base_lineage=Lineage(0),
        base_version=Version(0),
        offset=0,
        nbytes=4,
        width=4,
    )
    deltas.keep(ask, b"delta")
    for _ in range(2):
        assert await deltas.make(ask, cast(Stored, None), cast(Stored, None)) == b"delta"
    assert not deltas._making  # pyright: ignore[reportPrivateUsage]
