"""Every rank uploads its own spans to a real server; ranks are threads here, each with a connection of its own."""

import asyncio
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from staleflow.clients.trainer.ranks.leader import Leader, RankBackend, follow
from staleflow.clients.weights import Publisher, Puller, host_buffer, local_upload, publish
from staleflow.clients.weights.sharded import RankUpload, Span, Spans
from staleflow.clients.weights.tensors import NamedTensors, tensor_of
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.manifest import digest, lay_out
from staleflow.protocols.wire.messages import BeginPublishReply, Manifest, RegisterVersionReply
from staleflow.protocols.wire.tensors import Array
from tests.clients.trainer.forked_ranks import start_rank
from tests.clients.trainer.ranks.rows import Rows
from tests.clients.trainer.ranks.test_leader import Fed, Ranks, Recorded, Room
from tests.clients.weights.opened import open_files
from tests.clients.weights.test_local_upload import on
from tests.servers.parameters.test_service import files, versions
from tests.servers.running import Run, Trainer, produced

LIMIT_S = 200.0


def made(seed: int) -> dict[str, Array]:
    """Weights whose rows are larger than a page, and a vector whose last row no second rank has."""
    random = np.random.default_rng(seed)
    return {
        "embed": random.random((5, 3000), dtype=np.float32),
        "norm": random.integers(0, 2**16, 7, dtype=np.uint16),
        "head": random.random((4, 2, 700), dtype=np.float32),
    }


def manifest(weights: dict[str, Array]) -> Manifest:
    """Return what one process would commit for these weights."""
    tensors = (tensor_of(name, array) for name, array in weights.items())
    return lay_out((tensor.name, tensor.dtype, tensor.shape, digest(tensor.data)) for tensor in tensors)


class Near(Publisher):
    """A publisher of which the test sees every upload that it takes part in."""

    host = ""

    def __init__(self, run: Run, name: str) -> None:
        super().__init__(run.where.parameters, worker=WorkerId(name))
        self.uploads: list[int] = []
        self.open = asyncio.Event()
        """Set unless the test delays the writes of this rank."""
        self.open.set()
        run.clients.append(self)

    async def write_spans(self, to: BeginPublishReply, weights: Spans) -> RankUpload:
        self.uploads.append(to.upload)
        await self.open.wait()
        return await super().write_spans(msgspec.structs.replace(to, host=self.host or to.host), weights)


class Far(Near):
    """A publisher on another host than the server."""

    host = "elsewhere"


class Backend(Recorded):
    """A rank's backend, with its rows of the weights."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(together=True)
        self.rows = rows

    def sharded_weights(self) -> Rows:
        return self.rows


class Team:
    """Two ranks of a trainer; the second follows the orders of the first in a thread."""

    def __init__(self, run: Run, trainer: Trainer, kinds: tuple[type[Near], type[Near]] = (Near, Near)) -> None:
        self.publishers = kinds[0](run, trainer.worker), kinds[1](run, "trainer-rank-1.1")
        trainer.publisher = self.publishers[0]
        self._trainer = trainer
        self._loop = asyncio.get_running_loop()
        self._rooms = Room(LIMIT_S), Room(LIMIT_S), Room(LIMIT_S)
        self.backends = Backend(Rows({})), Backend(Rows({}))
        term = TrainerTerm(trainer.joined.trainer_term)
        self.leader = Leader(self._backend(0), self._ranks(0), lambda: (term, Version(0)))
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    async def publish(
        self,
        weights: NamedTensors,
        version: int = 0,
        batch: BatchId | None = None,
        *,
        second: Rows | None = None,
        released: Callable[[], None] | None = None,
    ) -> RegisterVersionReply:
        self.backends[0].rows = Rows(weights, 0, 2)
        self.backends[1].rows = second or Rows(weights, 1, 2)
        joined = self._trainer.joined
        return await self.publishers[0].publish(
            self.leader.weights(),
            trainer_term=joined.trainer_term,
            lineage=joined.lineage,
            version=Version(version),
            batch=batch,
            released=released,
        )

    async def close(self) -> None:
        """Release the second rank, which ends its thread."""
        await asyncio.to_thread(self.leader.close)
        await asyncio.to_thread(self.thread.join, LIMIT_S)
        assert not self.thread.is_alive()

    def _backend(self, rank: int) -> RankBackend:
        return cast("RankBackend", self.backends[rank])

    def _ranks(self, rank: int) -> Ranks:
        return Ranks(self._rooms[0], rank, *self._rooms[1:])

    def _follow(self) -> None:
        follow(self._backend(1), self._ranks(1), Fed(), lambda: False, self._write_spans)

    def _write_spans(self, to: BeginPublishReply, weights: Spans) -> RankUpload:
        writing = self.publishers[1].write_spans(to, weights)
        return asyncio.run_coroutine_threadsafe(writing, self._loop).result(LIMIT_S)


class Blocked(Rows):
    """The rows of the second rank, which stops before its second span until ``go`` is set."""

    def __init__(self, weights: NamedTensors) -> None:
        super().__init__(weights, 1, 2)
        self.begun, self.go = threading.Event(), threading.Event()

    def spans(self) -> Iterator[Span]:
        for number, span in enumerate(super().spans()):
            if number == 1:
                self.begun.set()
                assert self.go.wait(LIMIT_S)
            yield span


async def check_readable(run: Run, version: int, weights: dict[str, Array]) -> None:
    """A reader gets the manifest and the bytes that one process would have published."""
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
    async with await puller.pull(Lineage(0), Version(version)) as pulled:
        assert {name: array.tobytes() for name, array in pulled.arrays().items()} == {
            name: array.tobytes() for name, array in weights.items()
        }
    puller.close()
    assert (await versions(run))[version]["sha"] == manifest(weights).sha


@pytest.mark.parametrize("kinds", [(Near, Near), (Near, Far), (Far, Near), (Far, Far)])
async def test_ranks_on_any_hosts_publish_what_one_process_would(
    run: Run, kinds: tuple[type[Near], type[Near]]
) -> None:
    team = Team(run, await run.trainer(), kinds)
    await team.publish(made(0))
    await check_readable(run, 0, made(0))
    assert [len(publisher.uploads) for publisher in team.publishers] == [1, 1]
    assert "gather" not in team.backends[1].calls
    await team.close()


async def test_files_of_deleted_versions_are_overwritten_by_every_rank(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_upload, "file_system", on("ext4"))  # where files are written through kept maps
    run = make_run(parameters={"keep_versions": 1})
    for start in (run.scheduler, run.trajectories, run.parameters):
        start()
    trainer = await run.trainer()
    team, inodes = Team(run, trainer), list[int]()
    await team.publish(made(0))
    async with produced(run):
        for step in range(6):
            batch = await trainer.next_batch(step)
            await team.publish(made(step + 1), step + 1, batch.batch)
            inodes.append((run.run_dir / f"parameters/0-{step + 1}.bin").stat().st_ino)
            await check_readable(run, step + 1, made(step + 1))
    assert len(set(inodes)) < len(inodes), "a file was recycled"
    await team.close()


@pytest.mark.parametrize("kind", [Near, Far])
async def test_all_ranks_write_again_after_the_server_restarted_in_the_middle(
    make_run: Callable[..., Run], kind: type[Near]
) -> None:
    run = make_run()
    run.scheduler()
    run.process("parameters")
    team = Team(run, await run.trainer(), (Near, kind))
    second = Blocked(made(0))
    publishing = asyncio.ensure_future(team.publish(made(0), second=second))
    assert await asyncio.to_thread(second.begun.wait, LIMIT_S)
    run.kill("parameters")
    run.process("parameters")
    assert await versions(run) == {}
    second.go.set()
    await publishing
    await check_readable(run, 0, made(0))
    first, again = (publisher.uploads for publisher in team.publishers)
    assert first == again
    assert len(first) == len(set(first)) == 2
    await team.close()


@pytest.mark.parametrize("kind", [Near, Far])
async def test_a_rank_of_a_replaced_trainer_changes_no_visible_version(run: Run, kind: type[Near]) -> None:
    old = await run.trainer("trainer-a")
    team = Team(run, old, (Near, kind))
    zombie = Blocked(made(0))
    publishing = asyncio.ensure_future(team.publish(made(0), second=zombie))
    assert await asyncio.to_thread(zombie.begun.wait, LIMIT_S)
    (abandoned,) = (run.run_dir / "parameters").glob("upload-*.part")
    inode = abandoned.stat().st_ino
    with abandoned.open("rb"):  # else the inode's number could be that of the next file
        new = await run.trainer("trainer-b")
        await new.publish(0, made(1))
        zombie.go.set()
        with pytest.raises(Refused) as no:
            await publishing
        assert no.value.code is Code.FENCED
        await check_readable(run, 0, made(1))
        assert files(run) == {"0-0.bin", "0-0.json"}
        assert (run.run_dir / "parameters/0-0.bin").stat().st_ino != inode, "no upload is recycled"
    await team.close()


async def test_the_weights_change_while_the_ranks_upload_copies_and_the_next_version_is_another(run: Run) -> None:
    team, weights, released = Team(run, trainer := await run.trainer()), made(0), asyncio.Event()
    for publisher in team.publishers:
        publisher.open.clear()
    publishing = asyncio.ensure_future(team.publish(weights, released=released.set))
    async with asyncio.timeout(LIMIT_S):
        await released.wait()
    await asyncio.to_thread(team.leader.save, Path("6"))
    assert ("save", "6") in team.backends[1].calls, "the second rank executes orders meanwhile"
    assert not publishing.done()
    for array in weights.values():
        array[...] = 0
    for publisher in team.publishers:
        publisher.open.set()
    await publishing
    await check_readable(run, 0, made(0))
    released.clear()
    async with produced(run):
        await team.publish(made(1), 1, (await trainer.next_batch(0)).batch, released=released.set)
    assert released.is_set()
    await check_readable(run, 1, made(1))
    await team.close()


async def test_without_room_for_copies_the_weights_are_released_at_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_buffer, "available", int)
    team, released = Team(run, await run.trainer()), asyncio.Event()
    await team.publish(made(0), released=released.set)
    assert not released.is_set()
    assert caplog.text.count("training waits for each version") == 2
    await check_readable(run, 0, made(0))
    await team.close()


async def test_any_other_error_of_a_rank_ends_the_publish_and_names_the_rank(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = Team(run, await run.trainer())

    async def fails(*_: object) -> RankUpload:
        raise KeyError("lm_head")

    monkeypatch.setattr(team.publishers[1], "write_spans", fails)
    with pytest.raises(RuntimeError, match=r"rank 1: KeyError\('lm_head'\)"):
        await team.publish(made(0))
    assert await versions(run) == {}
    await team.close()


async def ended(run: Run, output: Path, *words: str) -> list[int]:
    """Publish version 0 from two processes; return their exit codes."""
    module, given = "tests.clients.trainer.ranks.upload_process", [run.where.scheduler, *words]
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        ranks = [start_rank(rank, 2, meeting, module, given, output.with_suffix(f".{rank}")) for rank in range(2)]
    try:
        return [await asyncio.to_thread(rank.wait, LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
async def test_a_rank_that_is_killed_in_the_middle_leaves_no_version_and_the_next_ranks_publish_it(
    run: Run, tmp_path: Path
) -> None:
    first, second = await ended(run, tmp_path / "killed", "kill")
    assert (first > 0, second) == (True, -signal.SIGKILL), (tmp_path / "killed.0").read_text()
    assert await versions(run) == {}
    assert await ended(run, tmp_path / "again") == [0, 0]
    await check_readable(run, 0, made(0))


async def test_a_rank_whose_own_write_finds_no_room_makes_all_wait_and_write_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publish, "FULL_RETRY_INTERVAL_S", 0.0)
    team = Team(run, await run.trainer())
    files_of_second = team.publishers[1]._files  # pyright: ignore[reportPrivateUsage]
    tries, write_spans = 0, files_of_second.write_spans

    def full(*given: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries <= 2 * publish.TRIES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_spans(*given)

    monkeypatch.setattr(files_of_second, "write_spans", full)
    await team.publish(made(0))
    await check_readable(run, 0, made(0))
    assert "no room: [Errno 28] rank 1: No space left on device" in caplog.text
    assert len(set(team.publishers[0].uploads)) == 1, "the same upload is resumed"
    await team.close()


async def test_a_rank_keeps_no_map_of_a_file_that_is_deleted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "POLL_INTERVAL_S", 0.01)
    team = Team(run, await run.trainer())
    await team.publish(made(0))
    file = run.run_dir / "parameters/0-0.bin"
    assert open_files(file) > 0, "each rank keeps it for its next write"
    file.unlink()
    async with asyncio.timeout(LIMIT_S):
        while open_files(file):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await team.close()
