"""The mirror has every surviving version that the server keeps, and readers load its bytes or those of the server."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from staleflow.clients.weights import Puller, mapped, pull
from staleflow.clients.weights import mirror as reading
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import Join, JoinReply
from staleflow.protocols.wire.tensors import Array
from staleflow.servers.parameters import mirror as uploading
from staleflow.store import mirror
from staleflow.store.mirror import Index, read_index, url_of
from staleflow.store.objects import NoObject, Objects, StoreError
from tests.object_store import S3Server
from tests.servers.running import Run, Trainer, eventually, produced

pytestmark = pytest.mark.xdist_group("s3")

LARGE: dict[str, Array] = {
    "a": np.random.default_rng(0).random((700, 500), dtype=np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "b": np.random.default_rng(1).integers(0, 2**16, 300_001, dtype=np.uint16),
}
PART_BYTES = 300_000


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put readers on another host than the server, and versions into several parts."""
    for module in (mapped, pull):
        monkeypatch.setattr(module, "boot_id", lambda: "another host")
    monkeypatch.setattr(mirror, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(uploading, "RETRY_INTERVAL_S", 0.1)


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/shared" if request.param == "file" else s3_url(request)


def s3_url(request: pytest.FixtureRequest) -> str:
    return f"s3://{request.getfixturevalue('bucket')}/weights"


def started(make_run: Callable[..., Run], url: str, **parameters: object) -> Run:
    run = make_run(parameters={"mirror": url, "keep_versions": 1, **parameters})
    run.scheduler()
    run.trajectories()
    run.parameters()
    return run


async def objects_of(run: Run) -> Objects:
    status = await run.status(run.where.scheduler)
    return Objects(url_of(run.config.parameters.mirror, status["run"]))


async def index_of(objects: Objects) -> Index | None:
    try:
        return await read_index(objects)
    except NoObject:
        return None


async def has(objects: Objects, *versions: tuple[int, int]) -> Index:
    """Wait until the index names exactly these (lineage, version)."""
    return await shows(objects, lambda index: [(one.lineage, one.version) for one in index.versions] == [*versions])


async def shows(objects: Objects, expected: Callable[[Index], bool]) -> Index:
    """Wait for an index."""

    async def current() -> Index | None:
        index = await index_of(objects)
        return index if index is not None and expected(index) else None

    found: Index = await eventually(current)
    return found


@asynccontextmanager
async def reader(run: Run, objects: Objects) -> AsyncGenerator[Puller]:
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"), mirror=objects.url)
    try:
        yield puller
    finally:
        puller.close()


async def way(puller: Puller, version: int, weights: dict[str, Array], lineage: int = 0) -> str:
    """Return the road of a version after comparing its bytes."""
    async with await puller.pull(Lineage(lineage), Version(version)) as pulled:
        arrays = pulled.arrays()
        assert list(arrays) == list(weights)
        for name, array in weights.items():
            np.testing.assert_array_equal(arrays[name], array)
            assert arrays[name].dtype == array.dtype
        return pulled.way


def changed(by: int) -> dict[str, Array]:
    return {name: array + array.dtype.type(by) for name, array in LARGE.items()}


async def step(trainer: Trainer, version: int) -> None:
    """Train the step that makes ``version``."""
    batch = await trainer.next_batch(version - 1)
    await trainer.publish(version, changed(version), batch.batch)


async def test_a_reader_gets_a_new_version_from_the_mirror(make_run: Callable[..., Run], url: str) -> None:
    run = started(make_run, url)
    trainer = await run.trainer()
    await trainer.publish(0, LARGE)
    objects = await objects_of(run)
    async with reader(run, objects) as puller:
        assert await way(puller, 0, LARGE) == "from the mirror"  # it waited for the upload
        names = await objects.sizes()
        assert sum(name.endswith(".part") for name in names) == len(names) - 2 == 7
        assert (await read_index(objects)).lineage == 0


async def test_a_reader_on_the_servers_host_maps_the_file_without_waiting(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    (tmp_path / "file").write_bytes(b"")
    run = started(make_run, f"file://{tmp_path}/file")
    trainer = await run.trainer()
    await trainer.publish(0, LARGE)
    async with reader(run, await objects_of(run)) as puller:
        assert await way(puller, 0, LARGE) == "mapped"


async def test_old_versions_leave_the_mirror_and_a_restart_uploads_nothing_again(
    make_run: Callable[..., Run], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(make_run, url)
    trainer = await run.trainer()
    await trainer.publish(0, LARGE)
    objects = await objects_of(run)
    async with produced(run):
        for version in (1, 2):
            await step(trainer, version)
            index = await has(objects, (0, 0), (0, version))
    assert index.versions[-1].nbytes == 2_000_002  # version 0 is the trainer's checkpoint, version 1 is not needed

    async def removed() -> bool:  # the index stops naming a version before its bytes are deleted
        folders = {name.partition("/")[0] for name in await objects.sizes()} - {"index.json"}
        return folders == {one.folder for one in index.versions}

    await eventually(removed)

    await run.stop("parameters")
    await objects.put("9-9-0123456789abcdef/000000.part", b"the rest of a killed upload")
    sent: list[str] = []
    put = Objects.put

    async def counted(self: Objects, name: str, data: bytes) -> None:
        sent.append(name)
        await put(self, name, data)

    monkeypatch.setattr(Objects, "put", counted)
    run.parameters()

    async def cleaned() -> bool:
        return "9-9-0123456789abcdef" not in await objects.folders()

    await eventually(cleaned)
    async with reader(run, objects) as puller:
        assert await way(puller, 2, changed(2)) == "from the mirror"
    assert set(sent) == {"index.json"}


async def test_an_upload_that_was_interrupted_continues_with_the_missing_parts(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, sent, put = False, list[str](), Objects.put

    async def interrupted(self: Objects, name: str, data: bytes) -> None:
        if name.endswith(".part") and len(sent) == 3 and not works:
            raise StoreError("interrupted")
        sent.extend([name] if name.endswith(".part") else [])
        await put(self, name, data)

    monkeypatch.setattr(Objects, "put", interrupted)
    run = started(make_run, f"file://{tmp_path}/shared")
    trainer = await run.trainer()
    await trainer.publish(0, LARGE)
    objects = await objects_of(run)

    async def troubled() -> bool:
        return "interrupted" in (await run.status(run.where.parameters))["mirror"]

    await eventually(troubled)
    await run.stop("parameters")
    before = {name for name in await objects.sizes() if name.endswith(".part")}
    assert 0 < len(before) < 7
    sent.clear()
    works = True
    run.parameters()
    await has(objects, (0, 0))
    assert before.isdisjoint(sent)
    async with reader(run, objects) as puller:
        assert await way(puller, 0, LARGE) == "from the mirror"


async def test_a_server_that_is_killed_while_it_uploads_leaves_a_mirror_that_is_right(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PART_BYTES", 16 << 20)  # that of the server's process
    run = make_run(parameters={"mirror": f"file://{tmp_path}/shared"})
    run.scheduler()
    run.process("parameters")
    trainer = await run.trainer()
    big = {"w": np.arange(20_000_000, dtype=np.float32)}
    await trainer.publish(0, big)
    objects = await objects_of(run)

    async def begun() -> bool:
        return any(name.endswith(".part") for name in await objects.sizes())

    await eventually(begun)
    run.kill("parameters")
    names = await objects.sizes()
    if (index := await index_of(objects)) is not None and index.versions:
        assert f"{index.versions[0].folder}/manifest.json" in names
    run.process("parameters")
    async with reader(run, objects) as puller:
        assert await way(puller, 0, big) == "from the mirror"


async def test_a_damaged_object_is_not_loaded(make_run: Callable[..., Run], request: pytest.FixtureRequest) -> None:
    run = started(make_run, s3_url(request))
    trainer = await run.trainer()
    await trainer.publish(0, LARGE)
    objects = await objects_of(run)
    index = await has(objects, (0, 0))
    folder = index.versions[0].folder
    for damage in (b"x" * PART_BYTES, b"short"):
        await objects.put(f"{folder}/000003.part", damage)
        async with reader(run, objects) as puller:
            assert await way(puller, 0, LARGE) == "over the network"
    await objects.delete(f"{folder}/000003.part")
    async with reader(run, objects) as puller:
        assert await way(puller, 0, LARGE) == "over the network"


async def test_a_store_that_is_away_delays_nothing_and_is_used_again_when_it_returns(
    make_run: Callable[..., Run],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server: S3Server = request.getfixturevalue("s3_server")
    run = started(make_run, s3_url(request))
    monkeypatch.setattr(reading, "COOLDOWN_S", 0.0)
    trainer = await run.trainer()
    await trainer.publish(0, LARGE)
    objects = await objects_of(run)
    await has(objects, (0, 0))
    server.kill()
    try:
        async with produced(run), reader(run, objects) as puller:
            await step(trainer, 1)
            assert await way(puller, 1, changed(1)) == "over the network"
            await step(trainer, 2)
            assert await way(puller, 2, changed(2)) == "over the network"
            assert "error sending request" in (await run.status(run.where.parameters))["mirror"]
            server.start()
            server.make_bucket(request.getfixturevalue("bucket"))
            await has(objects, (0, 2))  # the returned server is empty
            assert await way(puller, 2, changed(2)) == "from the mirror"
    finally:
        server.kill()
        server.start()
    assert (await run.status(run.where.parameters))["mirror"] == ""
    assert sum("the mirror is behind" in record.message for record in caplog.records) == 1


async def test_a_bucket_that_is_forbidden_stops_no_training(
    make_run: Callable[..., Run], request: pytest.FixtureRequest
) -> None:
    server: S3Server = request.getfixturevalue("s3_server")
    url = s3_url(request)
    server.forbid(True)
    try:
        run = started(make_run, url)
        trainer = await run.trainer()
        await trainer.publish(0, LARGE)
        async with produced(run), reader(run, await objects_of(run)) as puller:
            await step(trainer, 1)
            assert await way(puller, 1, changed(1)) == "over the network"
        assert "InvalidAccessKeyId" in (await run.status(run.where.parameters))["mirror"]
    finally:
        server.forbid(False)


async def test_a_slow_store_keeps_no_reader_waiting(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "SLOW_UPLOAD_S", 0.2)
    may_go, put = asyncio.Event(), Objects.put

    async def slow(self: Objects, name: str, data: bytes) -> None:
        await may_go.wait()
        await put(self, name, data)

    run = started(make_run, f"file://{tmp_path}/shared")
    trainer = await run.trainer()
    objects = await objects_of(run)
    await has(objects)
    monkeypatch.setattr(Objects, "put", slow)
    await trainer.publish(0, LARGE)
    async with reader(run, objects) as puller:
        assert await way(puller, 0, LARGE) == "over the network"
        assert "slow" in (await run.status(run.where.parameters))["mirror"]
        may_go.set()
        await has(objects, (0, 0))
        assert await way(puller, 0, LARGE) == "from the mirror"


async def test_a_rollback_removes_what_it_abandoned(make_run: Callable[..., Run], url: str) -> None:
    run = started(make_run, url, keep_versions=4)
    trainer = await run.trainer()
    await trainer.publish(0, LARGE)
    objects = await objects_of(run)
    async with produced(run):
        for version in (1, 2):
            await step(trainer, version)
        await shows(objects, lambda index: index.versions[-1].version == 2)
        again = Join(trainer=trainer.worker, lineage=Lineage(0), version=Version(0))
        trainer.joined = await trainer.scheduler.ask(again, JoinReply)
        assert trainer.joined.lineage == 1
        rolled_back = await shows(objects, lambda index: index.lineage == 1)  # before the lineage has a version
        assert [one.version for one in rolled_back.versions] == [0]
        async with reader(run, objects) as puller:  # an order from before the rollback: nothing to wait for
            assert await way(puller, 2, changed(2)) == "over the network"
        await step(trainer, 1)
        await has(objects, (0, 0), (1, 1))
        async with reader(run, objects) as puller:
            assert await way(puller, 1, changed(1), lineage=1) == "from the mirror"
        assert all(name.startswith(("0-0-", "1-1-")) for name in await objects.folders())


async def test_a_rollback_is_shown_while_an_abandoned_version_is_being_uploaded(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(make_run, f"file://{tmp_path}/shared")
    trainer = await run.trainer()
    await trainer.publish(0, LARGE)
    objects = await objects_of(run)
    await has(objects, (0, 0))
    begun, put = asyncio.Event(), Objects.put

    async def endless(self: Objects, name: str, data: bytes) -> None:
        if name.startswith("0-1-"):
            begun.set()
            await asyncio.Event().wait()
        await put(self, name, data)

    monkeypatch.setattr(Objects, "put", endless)
    async with produced(run):
        await step(trainer, 1)
        await begun.wait()
        again = Join(trainer=trainer.worker, lineage=Lineage(0), version=Version(0))
        await trainer.scheduler.ask(again, JoinReply)
        await shows(objects, lambda index: index.lineage == 1)
    await has(objects, (0, 0))


async def test_a_published_version_that_replaces_a_damaged_one_is_uploaded_again(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = started(make_run, f"file://{tmp_path}/shared")
    trainer = await run.trainer()
    await trainer.publish(0, LARGE)
    objects = await objects_of(run)
    folder = (await has(objects, (0, 0))).versions[0].folder
    await objects.put(f"{folder}/000000.part", b"x" * PART_BYTES)
    path = run.run_dir / "parameters" / "0-0.bin"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    async with reader(run, objects) as puller:
        with pytest.raises(Exception, match="corrupt"):
            await puller.pull(Lineage(0), Version(0))
        await trainer.publish(0, LARGE)

        async def whole() -> bool:
            return await way(puller, 0, LARGE) == "from the mirror"

        await eventually(whole)
