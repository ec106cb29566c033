"""A reader on another host rebuilds a version bit by bit from a delta, and pulls it whole where no delta is
possible."""

# pyright: reportPrivateUsage=false

import asyncio
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.weights import Puller, mapped, remote
from staleflow.clients.weights.direct_reader import DirectReader
from staleflow.net import weights
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.delta import encode
from staleflow.protocols.wire.messages import Chunk, GetDelta
from staleflow.protocols.wire.tensors import Array
from staleflow.servers.parameters.catalog import Catalog
from staleflow.servers.parameters.deltas import Deltas
from staleflow.servers.parameters.versions import Stored, VersionKey
from tests.servers.running import Run, produced

pytestmark = pytest.mark.usefixtures("elsewhere")
Weights = dict[str, Array]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put readers on another host than the server, over a link that is always slow, in small pieces."""
    monkeypatch.setattr(mapped, "boot_id", lambda: "another host")
    monkeypatch.setattr(weights, "CHUNK_BYTES", 100_000)
    monkeypatch.setattr(weights, "SPAN_BYTES", 100_000)
    monkeypatch.setattr(weights, "DELTA_MAX_BYTES_PER_S", float("inf"))
    monkeypatch.setattr(weights.DeltaChoice, "delta_took", weights.DeltaChoice.whole_took)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[GetDelta]:
    """Record every delta that a server has made."""
    seen: list[GetDelta] = []
    make = Deltas.make

    async def noted(self: Deltas, ask: GetDelta, *both: Any) -> bytes:
        seen.append(ask)
        return await make(self, ask, *both)

    monkeypatch.setattr(Deltas, "make", noted)
    return seen


def first() -> Weights:
    random = np.random.default_rng(0)
    return {
        "frozen": random.random((300, 100), dtype=np.float32),
        "bits": random.integers(0, 2**16, 300_001, dtype=np.uint16),  # bfloat16, including NaNs, infinities and -0.0
        "empty": np.zeros((0, 4), np.float32),
        "counts": np.arange(5, dtype=np.int64),
    }


def moved(weights: Weights, step: int) -> Weights:
    """Change a few bits of two tensors."""
    after = {name: array.copy() for name, array in weights.items()}
    after["bits"][step::1000] ^= np.uint16(0x8001)
    after["counts"][0] = -step
    return after


def started(make_run: Callable[..., Run], **parameters: Any) -> Run:
    run = make_run(parameters=parameters)
    run.scheduler()
    run.trajectories()
    run.parameters()
    return run


def delta(*, base: int = 0, version: int = 1, offset: int = 0, nbytes: int = 64, width: int = 2) -> GetDelta:
    return GetDelta(
        lineage=Lineage(0),
        version=Version(version),
        base_lineage=Lineage(0),
        base_version=Version(base),
        offset=offset,
        nbytes=nbytes,
        width=width,
    )


async def publish(run: Run, *versions: Weights) -> None:
    """Publish one version after another, each but the first after a train step."""
    trainer = await run.trainer()
    await trainer.publish(0, versions[0])
    async with produced(run):
        for version, tensors in enumerate(versions[1:], start=1):
            await trainer.publish(version, tensors, (await trainer.next_batch(version - 1)).batch)


def reader(run: Run, name: str = "reader.1", *, deltas: bool = True) -> Puller:
    puller = Puller(run.where.parameters, worker=WorkerId(name), deltas=deltas)
    run.clients.append(puller)
    return puller


async def pulled(puller: Puller, version: int) -> Weights:
    async with await puller.pull(Lineage(0), Version(version)) as found:
        return {name: array.copy() for name, array in found.arrays().items()}


def same(found: Weights, wanted: Weights) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].tobytes() == array.tobytes()


async def pinned(run: Run) -> dict[int, list[str]]:
    status = await run.status(run.where.parameters)
    return {version["version"]: version["pinned_by"] for version in status["versions"]}


@pytest.mark.parametrize("kind", ["raw", "compressed"])
async def test_the_next_version_comes_as_what_changed(
    make_run: Callable[..., Run], asked: list[GetDelta], kind: str
) -> None:
    run = started(make_run, delta=kind)
    before = first()
    after = moved(before, 1)
    await publish(run, before, after)
    puller = reader(run)
    same(await pulled(puller, 0), before)
    assert asked == []
    same(await pulled(puller, 1), after)
    assert {(ask.base_version, ask.version) for ask in asked} == {(0, 1)}
    chunks = {(ask.offset, ask.nbytes) for ask in asked}  # a slow answer may be requested twice
    assert sum(nbytes for _, nbytes in chunks) < after["bits"].nbytes + 1000  # without the frozen tensor
    assert await pinned(run) == {0: [], 1: ["reader.1"]}  # the base of the next delta


async def test_a_reader_that_is_behind_gets_one_delta_from_what_it_has(run: Run, asked: list[GetDelta]) -> None:
    versions = [first()]
    for step in range(1, 5):
        versions.append(moved(versions[-1], step))
    puller = reader(run)
    trainer = await run.trainer()
    await trainer.publish(0, versions[0])
    same(await pulled(puller, 0), versions[0])
    async with produced(run):
        for version in range(1, 5):
            await trainer.publish(version, versions[version], (await trainer.next_batch(version - 1)).batch)
    same(await pulled(puller, 4), versions[4])
    assert {(ask.base_version, ask.version) for ask in asked} == {(0, 4)}  # kept as its base, beyond keep_versions=2
    same(await pulled(puller, 4), versions[4])


async def test_a_base_gives_way_where_there_is_no_room(make_run: Callable[..., Run], asked: list[GetDelta]) -> None:
    run = started(make_run, budget_mb=3, keep_versions=9)
    versions = [{"w": np.full(1 << 18, step, np.float32)} for step in range(4)]
    puller = reader(run)
    trainer = await run.trainer()
    await trainer.publish(0, versions[0])  # the checkpoint
    async with produced(run):
        for version in range(1, 4):
            batch = (await trainer.next_batch(version - 1)).batch
            async with asyncio.timeout(60):
                await trainer.publish(version, versions[version], batch)
            if version == 1:
                same(await pulled(puller, 1), versions[1])
                assert await pinned(run) == {0: [], 1: ["reader.1"]}
    assert await pinned(run) == {0: [], 2: [], 3: []}
    same(await pulled(puller, 3), versions[3])
    assert asked == []


async def test_arrays_that_somebody_kept_stay_what_they_were(run: Run, asked: list[GetDelta]) -> None:
    before = first()
    after = moved(before, 1)
    await publish(run, before, after)
    puller = reader(run)
    async with await puller.pull(Lineage(0), Version(0)) as found:
        kept = found.arrays()
    same(await pulled(puller, 1), after)
    same(kept, before)
    assert asked != []


async def test_a_base_that_somebody_looks_at_is_copied_beside_the_loop(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, copying = remote._copied, list[bool]()

    def noted(buffer: Any) -> Any:
        copying.append(threading.current_thread() is threading.main_thread())
        return copied(buffer)

    monkeypatch.setattr(remote, "_copied", noted)
    before = first()
    await publish(run, before, moved(before, 1))
    puller = reader(run)
    async with await puller.pull(Lineage(0), Version(0)) as found:
        kept = found.arrays()
    await pulled(puller, 1)
    same(kept, before)
    assert copying == [False]


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_for_a_version_is_given_as_it_is_written() -> None:
    """Filling all of it at once would block every thread of a worker, including its heartbeat."""
    before, nbytes = resident(), 1 << 28
    made = [remote.Remote()._take(nbytes), DirectReader(WorkerId("reader.1"))._memory(nbytes)]
    assert resident() - before < nbytes // 4
    for buffer in made:
        assert (len(buffer), buffer[0], buffer[-1]) == (nbytes, 0, 0)
        buffer[7:9] = b"ab"
        assert remote.is_free(buffer)
        seen = np.frombuffer(memoryview(buffer)[7:9], np.uint8)
        assert not remote.is_free(buffer)
        assert seen.tobytes() == b"ab"


async def test_a_version_whose_base_the_server_no_longer_has_comes_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch, asked: list[GetDelta]
) -> None:
    before = first()
    after = moved(before, 1)
    await publish(run, before, after)
    puller = reader(run)
    same(await pulled(puller, 0), before)
    find = Catalog.find

    def but_the_first(self: Catalog, key: VersionKey) -> Stored:
        return find(self, VersionKey(key.lineage, key.version if key.version else Version(7)))

    monkeypatch.setattr(Catalog, "find", but_the_first)
    same(await pulled(puller, 1), after)
    assert asked == []


@pytest.mark.parametrize("wrong", [b"not a delta", encode(bytes(100_000), b"x" * 100_000, 2)])
async def test_a_delta_that_does_not_give_the_version_is_followed_by_the_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch, wrong: bytes
) -> None:
    before = first()
    after = moved(before, 1)
    await publish(run, before, after)
    puller = reader(run)
    same(await pulled(puller, 0), before)

    async def made(*_: Any) -> bytes:
        return wrong

    monkeypatch.setattr(Deltas, "make", made)
    same(await pulled(puller, 1), after)


async def test_versions_of_other_tensors_come_whole(run: Run, asked: list[GetDelta]) -> None:
    before = first()
    after = {name: array for name, array in before.items() if name != "frozen"}
    await publish(run, before, after)
    puller = reader(run)
    same(await pulled(puller, 0), before)
    same(await pulled(puller, 1), after)
    assert asked == []


async def test_no_delta_is_asked_for_where_it_does_not_pay_or_is_not_wanted(
    run: Run, monkeypatch: pytest.MonkeyPatch, asked: list[GetDelta]
) -> None:
    before = first()
    await publish(run, before, moved(before, 1))
    unwilling = reader(run, "reader.1", deltas=False)
    monkeypatch.setattr(weights, "DELTA_MAX_BYTES_PER_S", 0.0)
    for puller in (unwilling, reader(run, "reader.2")):
        same(await pulled(puller, 0), before)
        same(await pulled(puller, 1), moved(before, 1))
    assert asked == []
    assert await pinned(run) == {0: [], 1: []}


async def test_a_span_that_is_none_is_refused(make_run: Callable[..., Run]) -> None:
    run = started(make_run)
    before = first()
    await publish(run, before, moved(before, 1))
    client = run.client(run.where.parameters, WorkerId("reader.1"))
    for ask in (
        delta(width=3),
        delta(nbytes=0),
        delta(nbytes=-8),
        delta(offset=-8),
        delta(offset=1 << 40),
        delta(nbytes=1 << 40),
        delta(nbytes=7),
    ):
        with pytest.raises(Refused, match=r"are not a span of a version of \d+ bytes") as no:
            await client.call(ask)
        assert no.value.code is Code.MALFORMED
    with pytest.raises(Refused, match="version 7 of lineage 0 is not here"):
        await client.call(delta(base=7))
    reply, frames = await client.call(delta())
    assert (reply, len(frames)) == (Chunk(offset=0), 1)


async def test_a_run_without_deltas_makes_none(make_run: Callable[..., Run]) -> None:
    run = started(make_run, delta="off")
    before = first()
    await publish(run, before, moved(before, 1))
    client = run.client(run.where.parameters, WorkerId("reader.1"))
    with pytest.raises(Refused, match=r'parameters\.delta is "off" in this run'):
        await client.call(delta())
