"""No rank trains a batch that is revoked while it waits; revoking a trained batch ends the trainer."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from staleflow.clients.background import Background
from staleflow.clients.trainer import main
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.commits import Commits
from staleflow.clients.trainer.data.batch import FetchedGroup
from staleflow.clients.trainer.data.micro_batches import MicroBatchStream
from staleflow.clients.trainer.data.prefetch import BatchStream
from staleflow.clients.trainer.errors import BadVersion
from staleflow.clients.trainer.ranks.follower import FollowerBatches
from staleflow.clients.trainer.ranks.leader import Leader, follow
from staleflow.clients.trainer.steps import Steps, StreamedSteps, WholeSteps
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, GroupId, LeaseId, Lineage, Step, TrainerTerm, Version
from staleflow.protocols.wire.messages import Batch, CheckBatch, Done, GetBatch, GetClaims, JoinReply, MemberRef
from tests.clients.trainer.making import config, payload
from tests.clients.trainer.ranks.test_leader import LIMIT_S, Ranks, Recorded, Room

Stepping = Callable[[Leader], Steps]


class Sealed:
    """A scheduler that replies with the sealed batches by step, of four groups each."""

    def __init__(self, batches: Mapping[int, int]) -> None:
        self.batches = dict(batches)
        self.fetched: list[tuple[int, int]] = []
        """(rank, batch) of every fetch."""

    async def ask(self, body: GetBatch | CheckBatch, _: type[Batch], *, timeout_s: float | None) -> Batch | Done:
        if isinstance(body, GetBatch):
            return await self._batch(body.step)
        if self.batches.get(body.step) != body.batch:
            raise Refused(Code.CONFLICT, f"batch {body.batch} is not the sealed batch of step {body.step}")
        return Done()

    async def call(self, body: GetClaims, *, timeout_s: float | None) -> tuple[Batch, list[memoryview]]:
        return await self._batch(body.step), []

    async def _batch(self, step: Step) -> Batch:
        while step not in self.batches:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        number = self.batches[step]
        return Batch(
            batch=BatchId(number),
            lineage=Lineage(0),
            step=step,
            attempt=1,
            members=[member(10 * number + place) for place in range(4)],
            digest=f"{number:064x}",
            mask_below=Version(-1),
        )

    def wait_for(self, rank: int, batch: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while (rank, batch) not in self.fetched:
            assert time.monotonic() < deadline, f"rank {rank} has not fetched batch {batch}"
            time.sleep(0.001)


def member(group: int) -> MemberRef:
    return MemberRef(
        group=GroupId(group),
        lease=LeaseId(group),
        lineage=Lineage(0),
        version=Version(0),
        sha=f"{group:064d}",
        shard=0,
        nbytes=50,
        sequence_tokens=5,
    )


class Fetching(MicroBatchStream):
    """Record each fetch and invent its groups."""

    def __init__(self, sealed: Sealed, rank: int, world: int) -> None:
        super().__init__(cast(Client, sealed), [], TrainerTerm(1), size=2, rank=rank, world=world)
        self._sealed = sealed

    async def _members(self, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        self._sealed.fetched += [(self._rank, member.group // 10) for member in members]
        return [FetchedGroup(group=m.group, row={}, payload=payload(m.group, [3, 2])) for m in members]


class RecordedCommits(Commits):
    """Record each publication, or raise ``no``."""

    def __init__(self, thread: Background) -> None:
        super().__init__(thread)
        self.published: list[tuple[int, int | None]] = []
        self.no: Refused | None = None

    def republish_damaged(self, term: TrainerTerm) -> None:
        pass

    def publish(
        self, weights: Any, term: TrainerTerm, lineage: Lineage, version: Version, batch: BatchId | None
    ) -> None:
        if self.no is not None:
            raise self.no
        self.published.append((version, batch))
        self.version = version


class Trainer(TrainerClient):
    """A trainer joined at version 0 that publishes nothing."""

    def __init__(self, folder: Path, sealed: Sealed, *, rank: int = 0, world: int = 1) -> None:
        super().__init__(f"ipc://{folder}/nobody", rank=rank, world=world)
        self._join_reply = JoinReply(trainer_term=TrainerTerm(1), lineage=Lineage(0), version=Version(0))
        self._sealed = sealed
        self._commits = self.commits = RecordedCommits(self._thread)

    def _stream(self, term: TrainerTerm) -> BatchStream:
        return Fetching(self._sealed, *self._place)

    def micro_batches(self, term: TrainerTerm, size: int = 1) -> MicroBatchStream:
        return Fetching(self._sealed, *self._place)


WEIGHTS = {"w": np.zeros(1, np.float32)}


def test_a_batch_that_is_taken_back_while_the_one_before_is_trained_is_fetched_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sealed = Sealed({0: 1, 1: 2})
    with Trainer(tmp_path, sealed) as trainer:
        for batch in trainer.batches(2):
            if batch.step == 0:
                sealed.wait_for(0, 2)
                sealed.batches[1] = 3
            trainer.commit(WEIGHTS)
    assert trainer.commits.published == [(1, 1), (2, 3)]
    assert list(dict.fromkeys(sealed.fetched)) == [(0, 1), (0, 2), (0, 3)]
    assert "batch 2 of step 1 was revoked, fetching its replacement" in caplog.text


def test_a_trainer_whose_batch_was_taken_back_looks_around_until_another_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups of the next batch may have to wait for the space that a checkpoint frees."""
    monkeypatch.setattr("staleflow.clients.trainer.client.POLL_INTERVAL_S", 0.01)
    sealed = Sealed({0: 1, 1: 2})
    with Trainer(tmp_path, sealed) as trainer:
        limit = threading.Timer(LIMIT_S, trainer.interrupt)
        limit.start()
        for batch in trainer.batches(2):
            if batch.step == 0:
                sealed.wait_for(0, 2)
                del sealed.batches[1]
                trainer.on_wait = lambda: sealed.batches.update({1: 3})
            trainer.commit(WEIGHTS)
        limit.cancel()
    assert trainer.commits.published == [(1, 1), (2, 3)]


def streamed(leader: Leader) -> Steps:
    return StreamedSteps(leader, 2)


@pytest.mark.parametrize("stepping", [WholeSteps, streamed])
def test_no_rank_takes_a_step_with_a_batch_that_was_taken_back_while_it_lay_ready(
    tmp_path: Path, stepping: Stepping
) -> None:
    sealed, room = Sealed({0: 1, 1: 2}), Room()
    first, second = Recorded(together=True), Recorded(together=True)
    with Trainer(tmp_path, sealed, world=2) as trainer, Trainer(tmp_path, sealed, rank=1, world=2) as other:
        followed = FollowerBatches(other, 2, streaming=stepping is streamed)
        following = (second, Ranks(room, 1), followed, lambda: False, other.write_spans)
        thread = threading.Thread(target=follow, args=following, daemon=True)
        thread.start()
        leader = Leader(first, Ranks(room, 0), lambda: trainer.current_term)
        trainer.same, trainer.share = leader.same, leader.share
        leader.load(None)
        for computed in stepping(leader)(trainer, 2, lambda: False):
            if computed.batch.step == 0:
                for rank in range(1 if stepping is streamed else 2):  # rank 0 decides when pieces are fetched
                    sealed.wait_for(rank, 2)
                sealed.batches[1] = 3
            trainer.commit(WEIGHTS)
        leader.close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    steps = [[call[1:3] for call in rank.calls if call[0] in ("train", "finish")] for rank in (first, second)]
    assert steps == [[(0, 1), (1, 3)]] * 2
    assert trainer.commits.published == [(1, 1), (2, 3)]


def test_a_batch_that_was_taken_back_while_it_was_trained_cannot_be_committed(tmp_path: Path) -> None:
    with Trainer(tmp_path, Sealed({0: 1})) as trainer:
        batches = trainer.batches(2)
        next(batches)
        trainer.commits.no = Refused(Code.BAD_VERSION, "batch 1 is not the sealed batch of step 0")
        with pytest.raises(BadVersion, match=r"step 0: batch 1 was revoked while it was trained, the step is void"):
            trainer.commit(WEIGHTS)
        trainer.commits.no = None
        with pytest.raises(RuntimeError, match="was not committed"):
            next(batches)
    assert trainer.commits.published == []


def test_the_process_of_a_trainer_with_a_void_step_says_why_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def train(*_: object) -> None:
        raise BadVersion("step 3: batch 4 was taken back")

    def run(serve: Callable[[None], Coroutine[Any, Any, None]], *_: object) -> int:
        asyncio.run(serve(None))
        return 0

    monkeypatch.setattr(main, "_main", train)
    monkeypatch.setattr("staleflow.clients.trainer.main.daemon.run", run)
    assert main.attach(config(), tmp_path, "trainer", "") == 1
    own = [record for record in caplog.records if record.name == main.__name__]
    assert [(r.levelno, r.getMessage(), r.exc_info) for r in own] == [
        (logging.ERROR, "step 3: batch 4 was taken back", None)
    ]


class Held:
    """A parameter server that takes no version before ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    async def publish(self, weights: Mapping[str, Any], **_: object) -> None:
        while not self.go.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def close(self) -> None:
        pass


class Listening:
    """A scheduler that seals the batch of step 1 once the trainer says that it waits for it."""

    def __init__(self, sealed: Sealed) -> None:
        self.requests: list[GetBatch] = []
        self._sealed = sealed

    async def call(self, body: GetBatch, *, timeout_s: float | None) -> None:
        self.requests.append(body)
        if body.waiting:
            self._sealed.batches[body.step] = 2
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


def test_a_trainer_that_waits_for_a_batch_while_it_publishes_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prefetching request looks the same whether it trains or waits."""
    sealed, publisher = Sealed({0: 1}), Held()
    listening = Listening(sealed)
    with Trainer(tmp_path, sealed) as trainer:
        limit = threading.Timer(LIMIT_S, trainer.interrupt)
        limit.start()
        monkeypatch.setattr(trainer.commits, "publisher", publisher)
        monkeypatch.setattr(trainer, "_scheduler", listening)
        batches = trainer.batches(2)
        assert next(batches).step == 0
        trainer.begin_commit(WEIGHTS)
        assert next(batches).step == 1
        assert [(body.step, body.waiting) for body in listening.requests] == [(1, True)]
        publisher.go.set()
        assert trainer.finish_commit() == 1
        batches.close()
        limit.cancel()
