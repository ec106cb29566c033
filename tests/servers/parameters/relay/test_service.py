"""Relays serve the same bytes, never a damaged one, as they arrive, for as long as a path to the bytes exists."""

import asyncio
import errno
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.net import weights
from staleflow.net.endpoint import Call
from staleflow.net.errors import Refused
from staleflow.process.daemon import Stop
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.messages import (
    Chunk,
    Done,
    Finished,
    GetChunk,
    GetDelta,
    GetStatus,
    JoinRelays,
    ManifestReply,
    RelayStatus,
)
from staleflow.servers.parameters import tree
from staleflow.servers.parameters.deltas import Deltas
from staleflow.servers.parameters.main import owned
from staleflow.servers.parameters.relay import service as relay
from staleflow.servers.parameters.relay.arrivals import Arrivals
from staleflow.servers.parameters.relay.main import attach, folder_of, serve_until
from staleflow.servers.parameters.service import ParameterService
from staleflow.servers.parameters.versions import NoRoom, VersionKey, Versions
from staleflow.servers.runner import Answer, Handled
from tests.servers.parameters.relay.growing import LARGE, RELAY_HOST, Grown, chunk, manifest_of, pulled, same
from tests.servers.running import GIVE_UP_S, Run, config_of, eventually, produced

pytestmark = pytest.mark.usefixtures("hosts")


@pytest.fixture
def root_chunks(monkeypatch: pytest.MonkeyPatch) -> list[GetChunk]:
    """Record every chunk that is requested from the parameter server itself, without resent requests."""
    seen: list[GetChunk] = []
    ids = set[tuple[str, int]]()
    handle = ParameterService.handle

    def noted(self: ParameterService, call: Call) -> Handled:
        if isinstance(call.body, GetChunk) and (call.route, call.id) not in ids:
            ids.add((call.route, call.id))
            seen.append(call.body)
        return handle(self, call)

    monkeypatch.setattr(ParameterService, "handle", noted)
    return seen


async def test_readers_of_a_relay_cost_the_parameter_server_one_copy(grown: Grown, root_chunks: list[GetChunk]) -> None:
    await grown.grow("relay-0")
    for name in ("reader.1", "reader.2", "reader.3"):
        found, is_mapped = await pulled(grown.reader(name))
        same(found)
        assert not is_mapped
    assert (await grown.tree())[0][
        "num_below"
    ] == 2  # one in three uses the parameter server, which serves the relay as well
    assert sum(ask.nbytes for ask in root_chunks) < 2.1 * sum(array.nbytes for array in LARGE.values())


async def test_readers_on_the_host_of_a_relay_map_its_file(
    grown: Grown, hosts: Callable[[str], None], root_chunks: list[GetChunk]
) -> None:
    hosts(RELAY_HOST)
    await grown.grow("relay-0")
    for name in ("reader.1", "reader.2", "reader.3"):
        found, is_mapped = await pulled(grown.reader(name))
        same(found)
        assert is_mapped
    assert sum(ask.nbytes for ask in root_chunks) < 1.1 * sum(array.nbytes for array in LARGE.values())
    assert (await grown.tree())[0]["num_below"] == 3


async def test_a_relay_below_a_relay_gives_a_tensor_before_the_whole_version_is_there(
    grown: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "FANOUT", 1)
    held, serve = asyncio.Event(), ParameterService._read  # pyright: ignore[reportPrivateUsage]

    async def late(self: ParameterService, peer: str, ask: GetChunk, *stored: Any) -> Answer:
        if ask.offset >= LARGE["first"].nbytes:
            await held.wait()
        return await serve(self, peer, ask, *stored)

    monkeypatch.setattr(ParameterService, "_read", late)
    for name in ("relay-0", "relay-1", "relay-2"):
        await grown.grow(name)
    assert [str(known["from"])[:7] for known in await grown.tree()] == ["", "relay-0", "relay-1"]
    client = await grown.client("relay-2")
    found = await client.ask(manifest_of(0), ManifestReply)
    assert found.path == ""
    reply, frames = await client.call(chunk(0, 40_000))
    assert reply == Chunk(offset=0)
    assert bytes(frames[0]) == LARGE["first"].tobytes()[:40_000]
    reading = asyncio.ensure_future(pulled(grown.reader()))
    await asyncio.sleep(0.3)
    assert not reading.done()
    held.set()
    same((await reading)[0])


async def test_a_damaged_tensor_is_never_given_on(
    grown: Grown, monkeypatch: pytest.MonkeyPatch, root_chunks: list[GetChunk]
) -> None:
    monkeypatch.setattr(tree, "FANOUT", 1)
    await grown.grow("relay-0")
    await grown.grow("relay-1")
    read, damaged = Arrivals.read, 0

    async def flipped(self: Arrivals, key: VersionKey, offset: int, size: int) -> Data:
        nonlocal damaged
        data = await read(self, key, offset, size)
        if len(self._upstream.above) or offset < 200_000:  # pyright: ignore[reportPrivateUsage]
            return data
        damaged += 1
        return bytes([data[0] ^ 1]) + bytes(data[1:])

    monkeypatch.setattr(Arrivals, "read", flipped)
    client = await grown.client("relay-1")
    await client.ask(manifest_of(0), ManifestReply)
    got = bytearray()
    found = await client.ask(manifest_of(0), ManifestReply)
    while len(got) < found.manifest.nbytes:
        _, frames = await client.call(chunk(len(got), 50_000))
        got += frames[0]
    for entry in found.manifest.tensors:
        assert got[entry.offset : entry.offset + entry.nbytes] == LARGE[entry.name].tobytes()
    assert damaged > 0
    assert len(root_chunks) > 0


async def test_a_reader_whose_relay_dies_gets_its_bytes_all_the_same(
    grown: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    await grown.grow("relay-0")
    reading = asyncio.Event()

    async def never(*_: Any) -> bytes:
        reading.set()
        await asyncio.sleep(3600)
        return b""

    monkeypatch.setattr(Arrivals, "read", never)
    pulling = asyncio.ensure_future(pulled(grown.reader()))
    await reading.wait()
    monkeypatch.setattr(weights, "PING_TIMEOUT_S", 0.5)  # not earlier: a live relay may answer a ping late
    await grown.end("relay-0")
    same((await pulling)[0])
    same((await pulled(grown.reader("reader.2")))[0])


async def test_a_relay_whose_source_leaves_hangs_below_another(grown: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "FANOUT", 1)
    for name in ("relay-0", "relay-1"):
        await grown.grow(name)
    await grown.end("relay-0")

    async def moved() -> bool:
        return [str(known["from"]) for known in await grown.tree()] == [""]

    await eventually(moved)
    same((await pulled(grown.reader()))[0])


async def test_the_next_version_reaches_a_relay_as_what_changed(grown: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "DELTA_MAX_BYTES_PER_S", float("inf"))
    asked: list[GetDelta] = []
    make = Deltas.make

    async def noted(self: Deltas, ask: GetDelta, *both: Any) -> bytes:
        asked.append(ask)
        return await make(self, ask, *both)

    monkeypatch.setattr(Deltas, "make", noted)
    await grown.grow("relay-0", mb_per_s=50.0)
    client = await grown.client("relay-0")
    after = {name: array.copy() for name, array in LARGE.items()}
    after["last"][::1000] ^= np.uint16(1)
    for version, tensors in enumerate((LARGE, after)):
        if version:
            trainer = await grown.run.trainer()
            async with produced(grown.run):
                await trainer.publish(version, tensors, (await trainer.next_batch(0)).batch)
        found = await client.ask(manifest_of(version, host=RELAY_HOST), ManifestReply)
        stored = await asyncio.to_thread(Path(found.path).read_bytes)
        for entry in found.manifest.tensors:
            assert stored[entry.offset : entry.offset + entry.nbytes] == tensors[entry.name].tobytes()
    assert {(ask.base_version, ask.version) for ask in asked} == {(0, 1)}

    def again(*_: Any) -> bytes:
        raise AssertionError("what a relay got it gives on")

    monkeypatch.setattr(Deltas, "_encode", again)
    for ask in set(asked):
        await client.call(ask)


async def test_a_relay_of_another_run_is_refused(grown: Grown) -> None:
    join = JoinRelays(worker=WorkerId("relay.1"), run="another", endpoint="tcp://10.0.0.1:1", host="h")
    client = grown.run.client(grown.run.where.parameters, WorkerId("relay.1"))
    with pytest.raises(Refused, match='the relay is of run "another"; this is run "run-') as no:
        await client.call(join)
    assert no.value.code is Code.CONFLICT
    assert await grown.tree() == []


async def test_a_relay_with_another_configuration_is_refused(grown: Grown, short_dir: Path) -> None:
    other = Run(short_dir / "other", parameters={"keep_versions": 7})
    stop = Stop()
    with pytest.raises(ConfigError, match="it refuses relay-0: relay-0 has other values of keys that all processes of"):
        await serve_until(stop, other.config, other.run_dir, "relay-0", grown.run.where.scheduler)


async def test_a_relay_named_as_the_server_is_refused_and_touches_nothing_of_it(grown: Grown) -> None:
    (grown.run.run_dir / "relays").mkdir()
    before = sorted(path.name for path in (grown.run.run_dir / "parameters").iterdir())
    assert [name for name in before if name.endswith(".bin")]
    with pytest.raises(ConfigError, match='it refuses parameters: name is "parameters", which is reserved'):
        await serve_until(Stop(), grown.run.config, grown.run.run_dir, "parameters", grown.run.where.scheduler)
    assert sorted(path.name for path in (grown.run.run_dir / "parameters").iterdir()) == before


async def test_a_relay_that_calls_other_weights_by_that_name_is_not_believed(
    grown: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    await grown.grow("relay-0")
    manifest = Arrivals.manifest

    async def another(self: Arrivals, key: VersionKey) -> Any:
        found = await manifest(self, key)
        return type(found)(tensors=found.tensors, nbytes=found.nbytes, sha="0" * 64)

    monkeypatch.setattr(Arrivals, "manifest", another)
    same((await pulled(grown.reader()))[0])


async def test_a_relay_without_room_says_no_and_its_readers_do_without_it(
    grown: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    await grown.grow("relay-0")

    def full(*_: Any) -> Any:
        raise NoRoom("0 bytes are free")

    monkeypatch.setattr(Versions, "stage", full)
    client = await grown.client("relay-0")
    with pytest.raises(Refused, match="this relay has no room: 0 bytes are free"):
        await client.ask(manifest_of(0), ManifestReply)
    same((await pulled(grown.reader()))[0])


async def test_a_relay_whose_file_gives_an_error_says_so_and_goes_on(
    grown: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    await grown.grow("relay-0")
    same((await pulled(grown.reader()))[0])
    client = await grown.client("relay-0")
    while (await client.ask(GetStatus(), RelayStatus)).coming:  # noqa: ASYNC110
        await asyncio.sleep(0.01)

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(Versions, "read", broken)
        with pytest.raises(Refused, match="Input/output error") as no:
            await client.call(chunk(0, 4))
    assert no.value.code is Code.BAD_VERSION
    _, frames = await client.call(chunk(0, 4))
    assert bytes(frames[0]) == LARGE["first"].tobytes()[:4]


async def test_a_relay_that_is_nowhere_is_refused(grown: Grown) -> None:
    status = await grown.run.status(grown.run.where.scheduler)
    join = JoinRelays(worker=WorkerId("relay.1"), run=str(status["run"]), endpoint="nowhere", host="h")
    with pytest.raises(Refused, match="it must be tcp://host:port or ipc:///path"):
        await grown.run.client(grown.run.where.parameters, WorkerId("relay.1")).call(join)
    assert await grown.tree() == []


async def test_a_relay_asked_for_what_is_not_says_so(grown: Grown) -> None:
    await grown.grow("relay-0")
    client = await grown.client("relay-0")
    with pytest.raises(Refused, match="version 5 of lineage 0 is not here"):
        await client.ask(manifest_of(5), ManifestReply)
    with pytest.raises(Refused, match="are outside a version of"):
        await client.call(chunk(1 << 40, 4))
    with pytest.raises(Refused, match="a relay does not serve JoinRelays"):
        await client.call(JoinRelays(worker=WorkerId("reader.9"), run="", endpoint="", host=""))


async def test_a_relay_ends_with_the_run(grown: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "POLL_INTERVAL_S", 0.05)
    await grown.grow("relay-0")
    stop, serving = grown.stops.pop("relay-0")
    trainer = await grown.run.trainer("trainer-b")
    await trainer.scheduler.ask(Finished(trainer_term=trainer.joined.trainer_term, error=""), Done)
    await asyncio.wait_for(serving, GIVE_UP_S)
    assert stop.why == "the run is over"


async def test_a_relay_is_a_process_that_may_be_killed(grown: Grown) -> None:
    process = grown.process("relay-0")
    try:
        await eventually(lambda: grown.is_there("relay-0"))
        same((await pulled(grown.reader()))[0])
        at = await grown.endpoint("relay-0")

        async def kept() -> bool:
            return [version["version"] for version in (await grown.run.status(at))["versions"]] == [0]

        await eventually(kept)
        worker = str((await grown.tree())[0]["relay"])
        process.kill()
        process.wait()
        same((await pulled(grown.reader("reader.2")))[0])
        process = grown.process("relay-0")
        await eventually(lambda: grown.is_another("relay-0", worker))
        same((await pulled(grown.reader("reader.3")))[0])
        process.terminate()
        assert await asyncio.to_thread(process.wait, GIVE_UP_S) == 0
    finally:
        process.kill()
        process.wait()


async def test_a_relay_serves_once_another_has_left_its_folder(grown: Grown) -> None:
    """A machine behind a lost link still drains while its replacement starts."""
    log = grown.run.run_dir / "logs" / "relay-0.log"

    async def waits() -> bool:
        return log.exists() and "another relay still owns it" in log.read_text()

    other = ExitStack()
    other.enter_context(owned(folder_of(grown.run.run_dir, "relay-0")))
    process = grown.process("relay-0")
    try:
        with other:
            await eventually(waits)
            assert await grown.tree() == []
        await eventually(lambda: grown.is_there("relay-0"))
        same((await pulled(grown.reader()))[0])
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:7000", "tcp://*:7000"])
def test_a_relay_must_listen_where_readers_can_be_sent(short_dir: Path, bind: str) -> None:
    config = config_of(short_dir)
    with pytest.raises(ConfigError, match="it must be one address of this host"):
        attach(config, short_dir, "relay-0", "ipc:///nowhere", bind, 0.0)
