"""A simulated trainer over the shipped connections: joins from its newest checkpoint, trains, publishes, is fenced."""

import asyncio
import os
import random
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from staleflow.clients.attachment import attach
from staleflow.clients.parameters import TRIES, damaged
from staleflow.clients.trainer.backend import NoBatch
from staleflow.clients.trainer.batches import FetchedGroup, TrainBatch
from staleflow.clients.trainer.client import LOOK_S
from staleflow.clients.trainer.pieces import PieceStream, joined
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, Lineage, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Attach,
    Batch,
    BeginPublish,
    CommitPublish,
    Done,
    Finished,
    Join,
    Joined,
    MemberRef,
    NextBatch,
    PublishChunk,
    PublishTo,
    RegisterCheckpoint,
    Registered,
)
from staleflow.runtime.client import Client, worker_id
from staleflow.runtime.errors import Refused
from staleflow.sim.faults.journal import Committed, Fetched
from staleflow.sim.faults.payload import manifest_of, weights_of
from staleflow.sim.faults.scene import Scene
from staleflow.sim.faults.virtual import Process

T = TypeVar("T")

CHUNK = 64
OTHER_RANK_SHARE = 0.2
ROGUE_SHARE = 0.03
FUTURE = 1_000
"""Versions ahead of everything: a trainer that comes from there is refused."""


class CheckedStream(PieceStream):
    """The shipped stream, of batches and of pieces; what it fetches is looked at."""

    def __init__(self, scene: Scene, scheduler: Client, shards: Sequence[Client], term: TrainerTerm) -> None:
        super().__init__(scheduler, shards, term, size=scene.config.trainer.stream_groups)
        self._scene = scene

    async def _members(self, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        found = await super()._members(members)
        scene = self._scene
        for item, member in zip(found, members, strict=True):
            scene.journal.looked["trainer"] += 1
            if item.group != member.group or not scene.journal.was_pushed(member.group, item.payload, member.lease):
                scene.journal.wrong.append(f"a trainer got bytes of group {member.group} that nobody wrote")
        return found


class Trainer:
    """One process's worth of training."""

    def __init__(self, scene: Scene, process: Process, name: str) -> None:
        self._scene = scene
        self._name = name
        self._rng = random.Random(scene.rng.getrandbits(64))
        self.me: WorkerId = worker_id(name)
        transport = scene.network.transport(process)
        self._scheduler = Client(scene.where.scheduler, worker=self.me, transport=transport)
        self._shards = [Client(address, worker=self.me, transport=transport) for address in scene.where.trajectories]
        self._parameters = Client(scene.where.parameters, worker=self.me, transport=transport)
        self._term = TrainerTerm(0)
        self._lineage = Lineage(0)
        self._from = Lineage(0)
        """Of the newest version: older than the trainer's own after a rollback."""

    async def run(self) -> None:
        """Train until the run has had enough, or another trainer has taken over."""
        await attach(self._scheduler, Attach(worker=self.me, name=self._name, role="trainer"), parameters=True)
        try:
            await self._train(await self._join())
        except Refused as no:
            if no.code is not Code.FENCED:
                raise
            self._scene.counts["a trainer was fenced"] += 1
        except NoBatch:
            self._scene.counts["a trainer came too late"] += 1

    async def _join(self) -> Version:
        """Take over from the newest checkpoint that the run accepts."""
        if self._rng.random() < 0.2:
            await self._try(Lineage(0), Version(FUTURE))
        while True:
            for lineage, version in [*reversed(self._scene.checkpoints), (Lineage(0), Version(0))]:
                joined = await self._try(lineage, version)
                if joined is not None:
                    del self._scene.checkpoints[self._newer_than(version) :]
                    self._term, self._lineage = joined.trainer_term, joined.lineage
                    self._from = lineage
                    if joined.version < 0:
                        await self._publish(Version(0), None)
                    return version
            await asyncio.sleep(0.1)  # another trainer has made a checkpoint meanwhile: look again

    def _newer_than(self, version: Version) -> int:
        """Where the checkpoints after that version begin."""
        return next((n for n, one in enumerate(self._scene.checkpoints) if one[1] > version), 10**9)

    async def _try(self, lineage: Lineage, version: Version) -> Joined | None:
        request = Join(trainer=self.me, lineage=lineage, version=version)
        try:
            return await self._scheduler.ask(request, Joined, timeout_s=None)
        except Refused as no:
            if no.code is not Code.BAD_VERSION:
                raise
            self._scene.counts["a trainer came from a bad version"] += 1
            return None

    async def _train(self, version: Version) -> None:
        stream = CheckedStream(self._scene, self._scheduler, self._shards, self._term)
        ahead = asyncio.ensure_future(self._batch(stream, Step(version)))
        while True:
            batch = await self._next(ahead, version)
            if not await stream.stands(batch):
                self._scene.counts["a batch was taken back before it was trained"] += 1
                ahead = asyncio.ensure_future(self._batch(stream, batch.step))
                continue
            self._note(batch)
            ahead = asyncio.ensure_future(self._batch(stream, Step(batch.step + 1)))
            try:
                await self._other_rank(batch)
                await asyncio.sleep(self._scene.step_s * (0.5 + self._rng.random()))
                version = Version(batch.step + 1)
                await self._publish(version, batch.batch)
                if version % self._scene.checkpoint_every == 0 or self._scene.finishing:
                    await self._checkpoint(version)
            except BaseException:
                ahead.cancel()
                raise
            if self._scene.finishing:
                ahead.cancel()
                await self._finish()
                return

    async def _finish(self) -> None:
        try:
            await self._scheduler.ask(Finished(trainer_term=self._term), Done, timeout_s=None)
        except Refused as no:
            if not no.is_over:  # the answer was lost
                raise
        self._scene.finished = True

    async def _batch(self, stream: CheckedStream, step: Step) -> TrainBatch:
        """The batch, in one or as the pieces add up."""
        trainer = self._scene.config.trainer
        if not trainer.streaming:
            return await stream.fetch(step)
        parts: list[TrainBatch] = []
        async with aclosing(stream.pieces(step)) as pieces:
            async for piece in pieces:
                if piece.first:
                    self._scene.counts["a step began again"] += bool(parts)
                    parts.clear()
                parts.append(piece.data)
                await asyncio.sleep(self._scene.step_s * self._rng.random() / trainer.batch_size)
                if piece.batch is not None:
                    return joined(parts, piece.batch)
        raise AssertionError("the pieces of a step end with its batch")

    async def _next(self, coming: "asyncio.Future[T]", version: Version) -> T:
        """What comes next. While nothing does, a newest version that was damaged is published again."""
        while not (await asyncio.wait((coming,), timeout=LOOK_S))[0]:
            if await damaged(self._parameters, self._from, version):
                term = self._scene.wrote[self._from, version]
                begin, data = self._begin(self._from, version, None, term)
                await self._until_whole(begin, data)
                self._scene.counts["a damaged version was published again"] += 1
        return coming.result()

    async def _other_rank(self, batch: TrainBatch) -> None:
        """Now and then another rank asks for the same step, and must get the same batch."""
        if self._rng.random() < OTHER_RANK_SHARE:
            ask = NextBatch(trainer_term=self._term, step=batch.step, rank=1)
            other = await self._scheduler.ask(ask, Batch, timeout_s=None)
            if other.batch == batch.batch and other.digest != batch.digest:
                self._scene.journal.wrong.append(f"two ranks got batch {batch.batch} with two digests")

    def _note(self, batch: TrainBatch) -> None:
        groups = tuple(dict.fromkeys(batch.group_ids.tolist()))
        fetched = Fetched(batch.batch, batch.lineage, batch.step, self._term, batch.digest, groups)
        self._scene.journal.fetched.append(fetched)

    async def _checkpoint(self, version: Version) -> None:
        self._scene.checkpoints.append((self._lineage, version))
        await asyncio.sleep(0.01)
        request = RegisterCheckpoint(trainer_term=self._term, lineage=self._lineage, version=version)
        await self._scheduler.ask(request, Done, timeout_s=None)

    # --- publishing ------------------------------------------------------------------------------------------

    async def _publish(self, version: Version, batch: BatchId | None) -> None:
        """Bytes first, then the commit; from the start if the server has forgotten the upload.

        A batch that was taken back while it was trained (a member is corrupt) cannot be published: that ends the
        trainer, as it ends the shipped one, and it comes back from its checkpoint.
        """
        wrote = self._scene.wrote
        wrote[self._lineage, version] = max(self._term, wrote.get((self._lineage, version), self._term))
        if self._rng.random() < ROGUE_SHARE:
            await self._fence_all()
        begin, data = self._begin(self._lineage, version, batch, self._term)
        self._scene.journal.published.setdefault((self._lineage, version), set()).add(manifest_of(data).sha)
        await self._until_whole(begin, data)
        self._from = self._lineage
        committed = Committed(self._term, self._lineage, version, manifest_of(data).sha, batch)
        self._scene.journal.committed.append(committed)

    async def _fence_all(self) -> None:
        """Begin to publish under a term that nobody was ever given: if that counted, no trainer could publish again."""
        term = TrainerTerm(self._term + 2**40)
        begin = BeginPublish(trainer_term=term, lineage=self._lineage, version=Version(0), batch=None, nbytes=1)
        try:
            await self._parameters.ask(begin, PublishTo, timeout_s=None)
        except Refused as no:
            self._scene.counts[f"a term that nobody was given: {no.code}"] += 1

    def _begin(
        self, lineage: Lineage, version: Version, batch: BatchId | None, made: TrainerTerm
    ) -> tuple[BeginPublish, bytes]:
        """The bytes of a version, which are others in each term; ``made``: that in which it was made."""
        data = weights_of(self._scene.seed, lineage, version, made)
        begin = BeginPublish(trainer_term=self._term, lineage=lineage, version=version, batch=batch, nbytes=len(data))
        return begin, data

    async def _until_whole(self, begin: BeginPublish, data: bytes) -> None:
        for attempt in range(1, TRIES + 1):
            try:
                await self._upload(begin, data)
            except Refused as no:
                if no.code is not Code.STALE or attempt == TRIES:
                    raise
                self._scene.counts["an upload was begun again"] += 1
            else:
                return

    async def _upload(self, begin: BeginPublish, data: bytes) -> None:
        to = await self._parameters.ask(begin, PublishTo, timeout_s=None)
        in_place = self._rng.random() >= 0.5 and _written(to.path, data)
        if in_place:
            await asyncio.sleep(0.01)
        else:
            for start in range(0, len(data), CHUNK):
                chunk = PublishChunk(upload=to.upload, offset=start)
                await self._parameters.ask(chunk, Done, [data[start : start + CHUNK]], timeout_s=None)
        commit = CommitPublish(upload=to.upload, manifest=manifest_of(data), in_place=in_place)
        await self._parameters.ask(commit, Registered, timeout_s=None)


def _written(path: str, data: bytes) -> bool:
    """Write into the server's file, as a trainer on its host does."""
    try:
        descriptor = os.open(Path(path), os.O_WRONLY)
    except OSError:
        return False
    try:
        os.pwrite(descriptor, data, 0)
    finally:
        os.close(descriptor)
    return True
