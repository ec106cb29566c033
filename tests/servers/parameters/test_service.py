"""The parameter server publishes a version once, serves it while in use, is fenced, and never serves half a version."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from staleflow.clients.weights import Puller
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.manifest import digest, lay_out
from staleflow.protocols.wire.messages import (
    BeginPublish,
    BeginPublishReply,
    Chunk,
    CommitPublish,
    Done,
    GetChunk,
    GetDelta,
    GetManifest,
    Manifest,
    ManifestReply,
    PublishChunk,
    RegisterVersionReply,
)
from staleflow.protocols.wire.tensors import Array
from staleflow.servers.parameters import uploads as uploads_module
from staleflow.servers.parameters.service import ParameterService
from staleflow.servers.parameters.uploads import Uploads
from staleflow.servers.parameters.versions import VersionKey, Versions
from staleflow.trace import run_history
from tests.servers.parameters.crowded import holds
from tests.servers.running import WEIGHTS, Run, StageWorker, Trainer, eventually, produced

BYTES = np.arange(100, dtype=np.float32).tobytes()


def manifest(data: bytes = BYTES) -> Manifest:
    return lay_out([("w", "float32", (100,), digest(data))])


def begin(trainer: Trainer, *, version: int = 0, term: int | None = None) -> BeginPublish:
    return BeginPublish(
        trainer_term=TrainerTerm(trainer.joined.trainer_term if term is None else term),
        lineage=Lineage(0),
        version=Version(version),
        batch=None,
        nbytes=len(BYTES),
    )


ANNOUNCED: dict[str, Any] = {"trainer_term": 1, "lineage": 0, "version": 0, "batch": None, "nbytes": 100}


async def upload(run: Run, trainer: Trainer, ask: BeginPublish, data: bytes = BYTES) -> RegisterVersionReply:
    client = run.client(run.where.parameters, trainer.worker)
    to = await client.ask(ask, BeginPublishReply)
    await client.ask(PublishChunk(upload=to.upload, offset=0), Done, [data])
    return await client.ask(CommitPublish(upload=to.upload, manifest=manifest()), RegisterVersionReply)


def files(run: Run) -> set[str]:
    """Files of versions and uploads, without the note of the newest version that the folder has reached."""
    return {path.name for path in (run.run_dir / "parameters").iterdir()} - {run_history.FILE}


async def versions(run: Run) -> dict[int, dict[str, Any]]:
    listed: list[dict[str, Any]] = (await run.status(run.where.parameters))["versions"]
    return {version["version"]: version for version in listed}


async def train(trainer: Trainer, steps: range) -> None:
    """Publish a version for each step."""
    for step in steps:
        batch = await trainer.next_batch(step)
        await trainer.publish(step + 1, {"w": np.full(100, step + 1, np.float32)}, batch.batch)


async def test_a_version_that_is_published_again_is_answered_the_same(run: Run) -> None:
    trainer = await run.trainer()
    first = await trainer.publish(0, WEIGHTS)
    assert await trainer.publish(0, WEIGHTS) == first
    assert list(await versions(run)) == [0]
    assert files(run) == {"0-0.bin", "0-0.json"}


async def test_a_version_with_other_bytes_is_a_conflict_and_the_first_wins(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    before = await versions(run)
    with pytest.raises(Refused) as no:
        await trainer.publish(0, {"w": np.zeros(3, np.float32)})
    assert no.value.code is Code.CONFLICT
    assert await versions(run) == before
    assert files(run) == {"0-0.bin", "0-0.json"}


async def test_what_a_publisher_left_goes_after_a_while_unless_it_may_still_become_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Versions(tmp_path, durability="process")
    uploads, ask = Uploads(held), BeginPublish(**ANNOUNCED)
    upload = uploads.add("trainer.1", ask, held.stage(VersionKey(ask.lineage, ask.version), ask.nbytes))
    uploads.leave("trainer.1")
    await uploads.forget_left()
    assert uploads.find(upload.number, "trainer.1") is upload  # the file exists again
    monkeypatch.setattr(uploads_module, "ABANDONED_TIMEOUT_S", -1.0)
    await uploads.forget_left()
    assert uploads.find(upload.number, "trainer.1") is upload
    uploads.leave("trainer.1")
    upload.committing = asyncio.create_task(asyncio.sleep(0))  # type: ignore[arg-type]
    await uploads.forget_left()
    assert [name[-5:] for name in os.listdir(tmp_path)] == [".part"]
    upload.committing = None
    await uploads.forget_left()
    assert os.listdir(tmp_path) == []
    with pytest.raises(Refused, match="begin again"):
        uploads.find(upload.number, "trainer.1")


async def test_an_upload_goes_on_after_its_publisher_was_gone(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, gone, on_gone = WorkerId("trainer.7"), asyncio.Event(), ParameterService.on_gone

    def told(self: ParameterService, peer: str) -> None:
        on_gone(self, peer)
        if peer == publisher:
            gone.set()

    monkeypatch.setattr(ParameterService, "on_gone", told)
    run = make_run()
    for start in (run.scheduler, run.trajectories, run.parameters):
        start()
    trainer = await run.trainer()
    first = Client(run.where.parameters, worker=publisher)
    to = await first.ask(begin(trainer), BeginPublishReply)
    await first.ask(PublishChunk(upload=to.upload, offset=0), Done, [BYTES[:200]])
    first.close()
    async with asyncio.timeout(60):
        await gone.wait()
    again = run.client(run.where.parameters, publisher)
    await again.ask(PublishChunk(upload=to.upload, offset=200), Done, [BYTES[200:]])
    published = await again.ask(CommitPublish(upload=to.upload, manifest=manifest()), RegisterVersionReply)
    assert published == RegisterVersionReply(lineage=Lineage(0), version=Version(0))


async def test_slow_work_on_files_is_done_in_threads(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[bool]] = {name: set() for name in ("write", "remove", "discard")}

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            threads[name].add(threading.current_thread() is threading.main_thread())
            return real(*given)

        return call

    for name in threads:
        monkeypatch.setattr(Versions, name, noted(name, getattr(Versions, name)))
    run = make_run(parameters={"keep_versions": 1})
    for start in (run.scheduler, run.trajectories, run.parameters):
        start()
    trainer = await run.trainer()
    await upload(run, trainer, begin(trainer))
    await upload(run, trainer, begin(trainer))
    async with produced(run):
        await train(trainer, range(6))

    async def removed() -> bool:
        return bool(threads["remove"])

    await eventually(removed)
    assert threads == {"write": {False}, "remove": {False}, "discard": {False}}


async def test_a_publish_by_an_older_trainer_is_fenced_at_every_step(run: Run) -> None:
    old = await run.trainer("trainer-a")
    client = run.client(run.where.parameters, old.worker)
    under_way = await client.ask(begin(old), BeginPublishReply)
    new = await run.trainer("trainer-b")
    assert new.joined.trainer_term > old.joined.trainer_term
    await upload(run, new, begin(new))
    for late in (
        begin(old, version=1),
        CommitPublish(upload=under_way.upload, manifest=manifest()),
    ):
        with pytest.raises(Refused) as no:
            await client.call(late)
        assert no.value.code in (Code.FENCED, Code.STALE)


@pytest.mark.parametrize("ahead", [1, 2**62])
async def test_a_term_that_has_not_begun_fences_nobody(run: Run, ahead: int) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    client, term = run.client(run.where.parameters, WorkerId("thief.1")), trainer.joined.trainer_term
    with pytest.raises(Refused, match=rf"unknown trainer term: {term + ahead}; the newest one is {term}") as no:
        await client.call(begin(trainer, term=term + ahead))
    assert no.value.code is Code.DENIED
    assert (await trainer.publish(0, WEIGHTS)).version == 0
    successor = await run.trainer("trainer-b")
    assert (await successor.publish(0, WEIGHTS)).version == 0


class Counted:
    """Weights that count how often they are sent."""

    passes = 0

    def items(self) -> Iterable[tuple[str, Array]]:
        self.passes += 1
        return WEIGHTS.items()


async def test_a_version_that_the_scheduler_refuses_is_sent_once_and_forgotten(run: Run) -> None:
    trainer, weights = await run.trainer(), Counted()
    await trainer.publish(0, WEIGHTS)
    with pytest.raises(Refused, match="batch 77 is not the sealed batch of step 0") as no:
        await trainer.publish(1, weights, BatchId(77))
    assert (no.value.code, weights.passes) == (Code.BAD_VERSION, 1)
    assert list(await versions(run)) == [0]


async def test_bytes_that_are_not_those_of_the_manifest_are_refused(run: Run) -> None:
    trainer = await run.trainer()
    with pytest.raises(Refused, match=r"tensor w .* does not match its digest"):
        await upload(run, trainer, begin(trainer), BYTES[:-1] + b"?")
    assert await versions(run) == {}
    assert files(run) == set()
    assert (await upload(run, trainer, begin(trainer))).version == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nbytes": 396}, "offsets of the manifest"),
        ({"sha": "0" * 64}, "sha256 of the manifest"),
        ({"tensors": []}, "at least one tensor"),
    ],
)
async def test_a_manifest_that_contradicts_itself_is_refused(run: Run, change: dict[str, Any], says: str) -> None:
    trainer = await run.trainer()
    client = run.client(run.where.parameters, trainer.worker)
    to = await client.ask(begin(trainer), BeginPublishReply)
    bad = msgspec.structs.replace(manifest(), **change)
    with pytest.raises(Refused, match=says):
        await client.call(CommitPublish(upload=to.upload, manifest=bad))
    await client.ask(PublishChunk(upload=to.upload, offset=0), Done, [BYTES])
    good = CommitPublish(upload=to.upload, manifest=manifest())
    assert (await client.ask(good, RegisterVersionReply)).version == 0


async def test_a_chunk_outside_of_its_version_is_refused(run: Run) -> None:
    trainer = await run.trainer()
    client = run.client(run.where.parameters, trainer.worker)
    to = await client.ask(begin(trainer), BeginPublishReply)
    with pytest.raises(Refused, match="bytes 396 to 404 are outside a version of 400 bytes"):
        await client.call(PublishChunk(upload=to.upload, offset=396), [bytes(8)])


async def test_pins_and_the_newest_versions_are_kept_and_the_others_deleted(make_run: Callable[..., Run]) -> None:
    run = make_run(parameters={"keep_versions": 1})
    for start in (run.scheduler, run.trajectories, run.parameters):
        start()
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    async with produced(run):
        await train(trainer, range(1))
        puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
        pinned = await puller.pull(Lineage(0), Version(1))
        await train(trainer, range(1, 5))

    async def kept(*numbers: int) -> bool:
        return {*await versions(run)} >= {*numbers} and not {2, 3} & {*await versions(run)}

    assert await eventually(lambda: kept(0, 1, 5))  # 0 is the checkpoint, 1 is pinned
    assert (await versions(run))[1]["pinned_by"] == ["reader.1"]
    await pinned.close()

    async def deleted() -> bool:
        return 1 not in await versions(run)

    assert await eventually(deleted)
    assert not (run.run_dir / "parameters" / "0-1.bin").exists()
    puller.close()


async def test_the_file_of_a_deleted_version_takes_a_later_one_unless_somebody_reads_it(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(parameters={"keep_versions": 1})
    for start in (run.scheduler, run.trajectories, run.parameters):
        start()
    trainer = await run.trainer()
    folder, shape = run.run_dir / "parameters", 100
    await trainer.publish(0, {"w": np.zeros(shape, np.float32)})
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
    inodes: list[int] = []
    held: list[Array] = []
    async with produced(run):
        for step in range(6):
            batch = await trainer.next_batch(step)
            await trainer.publish(step + 1, {"w": np.full(shape, step + 1, np.float32)}, batch.batch)
            inodes.append((folder / f"0-{step + 1}.bin").stat().st_ino)
            async with await puller.pull(Lineage(0), Version(step + 1)) as pulled:
                np.testing.assert_array_equal(pulled.arrays()["w"], np.full(shape, step + 1, np.float32))
                if step == 1:
                    held.append(pulled.arrays()["w"])  # outlives the pin
            if step:
                await eventually(lambda step=step: _gone(folder, step))
    assert len(set(inodes)) < len(inodes)
    assert inodes[1] not in inodes[2:]
    np.testing.assert_array_equal(held, [np.full(shape, 2, np.float32)])
    puller.close()


async def _gone(folder: Path, version: int) -> bool:
    return not (folder / f"0-{version}.bin").exists()


async def test_where_the_budget_is_full_unused_versions_go_and_a_publish_waits_for_used_ones(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(parameters={"keep_versions": 9, "budget_mb": 3})
    for start in (run.scheduler, run.trajectories, run.parameters):
        start()
    trainer = await run.trainer()
    mib = {"w": np.zeros(1 << 18, np.float32)}
    with pytest.raises(Refused, match="budget_mb allows 3 MiB") as never:
        await trainer.publish(0, {"w": np.zeros(1 << 20, np.float32)})
    assert never.value.code is Code.DENIED
    await trainer.publish(0, mib)
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
    async with produced(run):
        for step in range(4):
            batch = await trainer.next_batch(step)
            await trainer.publish(step + 1, mib, batch.batch)
        assert sorted(await versions(run)) == [0, 3, 4]  # 0 is the checkpoint
        pinned = await puller.pull(Lineage(0), Version(3))
        batch = await trainer.next_batch(4)
        publishing = asyncio.create_task(trainer.publish(5, mib, batch.batch))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(publishing), 0.5)
        assert sorted(await versions(run)) == [0, 3, 4]
        await pinned.close()
        assert (await publishing).version == 5
    assert sorted(await versions(run)) == [0, 4, 5]
    puller.close()


async def test_where_the_disk_is_full_unused_versions_go(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(parameters={"keep_versions": 9})
    for start in (run.scheduler, run.trajectories, run.parameters):
        start()
    trainer = await run.trainer()
    mib = {"w": np.zeros(1 << 18, np.float32)}
    holds(monkeypatch, run.run_dir / "parameters", 3 << 20)
    await trainer.publish(0, mib)
    async with produced(run):
        for step in range(4):
            batch = await trainer.next_batch(step)
            async with asyncio.timeout(60):
                await trainer.publish(step + 1, mib, batch.batch)
    assert sorted(await versions(run)) == [0, 3, 4]  # 0 is the checkpoint


async def test_a_pin_ends_with_its_worker(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
    await puller.pull(Lineage(0), Version(0))
    assert (await versions(run))[0]["pinned_by"] == ["reader.1"]
    puller.close()

    async def free() -> bool:
        return not (await versions(run))[0]["pinned_by"]

    assert await eventually(free)


async def test_a_version_that_is_not_there_is_refused(run: Run) -> None:
    client = run.client(run.where.parameters, WorkerId("reader.1"))
    for ask in (
        GetManifest(worker=WorkerId("reader.1"), lineage=Lineage(0), version=Version(5)),
        GetChunk(lineage=Lineage(0), version=Version(5), offset=0, nbytes=4),
    ):
        with pytest.raises(Refused, match="version 5 of lineage 0 is not here") as no:
            await client.call(ask)
        assert no.value.code is Code.BAD_VERSION


async def test_a_file_that_changed_is_not_served_until_it_is_published_again(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    path = run.run_dir / "parameters" / "0-0.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    client = run.client(run.where.parameters, WorkerId("reader.1"))
    ask = GetManifest(worker=WorkerId("reader.1"), lineage=Lineage(0), version=Version(0))
    with pytest.raises(Refused, match="version 0 of lineage 0 is corrupt: tensor embed"):
        await client.call(ask)
    with pytest.raises(Refused, match="corrupt"):
        await client.call(GetChunk(lineage=Lineage(0), version=Version(0), offset=0, nbytes=4))
    await trainer.publish(0, WEIGHTS)
    assert isinstance((await client.call(ask))[0], ManifestReply)


@pytest.mark.parametrize("by", ["look", "piece"])
async def test_a_file_that_gives_an_error_is_named_and_not_served_and_the_server_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    client = run.client(run.where.parameters, WorkerId("reader.1"))
    ask = GetManifest(worker=WorkerId("reader.1"), lineage=Lineage(0), version=Version(0), doubted=True)

    def broken(descriptor: int, *_: object) -> Any:
        assert os.readlink(f"/proc/self/fd/{descriptor}").endswith("0-0.bin")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread" if by == "piece" else "preadv", broken)
        with pytest.raises(Refused, match=r"version 0 of lineage 0 is corrupt: .*Input/output error") as no:
            await client.call(
                GetChunk(lineage=Lineage(0), version=Version(0), offset=0, nbytes=4) if by == "piece" else ask
            )
        assert no.value.code is Code.BAD_VERSION
    assert "Input/output error" in (await versions(run))[0]["corrupt"]
    await trainer.publish(0, WEIGHTS)
    assert isinstance((await client.call(ask))[0], ManifestReply)


async def test_a_delta_from_a_file_that_gives_an_error_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    client = run.client(run.where.parameters, WorkerId("reader.1"))
    lineage, version = Lineage(0), Version(0)
    ask = GetDelta(
        lineage=lineage, version=version, base_lineage=lineage, base_version=version, offset=0, nbytes=8, width=4
    )

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(Versions, "read", broken)
        with pytest.raises(Refused, match="Input/output error") as no:
            await client.call(ask)
    assert no.value.code is Code.BAD_VERSION
    assert isinstance((await client.call(ask))[0], Chunk)


async def test_a_publish_waits_for_a_scheduler_that_is_away_and_pulls_go_on(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    await rollout.push(*(await rollout.leases(2)))
    stage = StageWorker(run)
    items, _ = await stage.take()
    await stage.finish(items)
    batch = await trainer.next_batch(0)
    await run.stop("scheduler")
    publish = asyncio.create_task(trainer.publish(1, {"w": np.ones(3, np.float32)}, batch.batch))
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
    async with await puller.pull(Lineage(0), Version(0)) as version:
        assert set(version.tensors()) == set(WEIGHTS)
    assert not publish.done()
    run.scheduler()
    assert (await publish).version == 1
    puller.close()


async def test_a_disk_without_room_makes_a_publish_wait(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = await run.trainer()
    client = run.client(run.where.parameters, trainer.worker)
    await run.status(run.where.parameters)

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(Exception, match="No space left on device"):
            await client.ask(begin(trainer), BeginPublishReply, timeout_s=3)
    assert files(run) == set()
    assert (await upload(run, trainer, begin(trainer))).version == 0
