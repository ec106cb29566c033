"""Sealed batches, one ahead: while a step computes, the next batch is awaited, fetched and laid out.

Consumes: ``Batch`` of the scheduler, then this rank's members from all shards at once. Produces: ``TrainBatch``, in
order of steps. Waits for the seal, which the ledger allows at most one step ahead. A batch that changes under our hands
(a corrupt member is quarantined, the batch is sealed anew) is asked for again.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence

from staleflow.clients.trainer.backend import NoBatch
from staleflow.clients.trainer.batches import FetchedGroup, TrainBatch, assemble
from staleflow.clients.trainer.shares import shares
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, Step, TrainerTerm
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Batch, FetchGroups, Groups, MemberRef, NextBatch
from staleflow.protocols.wire.tensors import arrays
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.runtime.client import Client
from staleflow.runtime.errors import Refused
from staleflow.runtime.retry import Backoff

log = logging.getLogger(__name__)

FETCH_GROUPS = 512
"""Most members of one request; eight frames each stay far below the transport's limit."""
FETCH_TOKENS = 4 << 20
"""Most tokens of one request; some ten bytes each."""


class BatchStream:
    """Feeds one trainer term. ``get`` is for one reader."""

    def __init__(
        self,
        scheduler: Client,
        shards: Sequence[Client],
        trainer_term: TrainerTerm,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._scheduler = scheduler
        self._shards = shards
        self._trainer_term = trainer_term
        self._rank = rank
        self._world = world
        self._ready: asyncio.Queue[TrainBatch | Exception] = asyncio.Queue(maxsize=1)

    async def feed(self, first: Step, end: int) -> None:
        """Fetch the batches of steps ``first .. end - 1``; an error is handed to the reader and ends the stream."""
        try:
            for step in range(first, end):
                await self._ready.put(await self.fetch(Step(step)))
        except Exception as error:  # it belongs to the training thread, which waits in ``get``
            await self._ready.put(error)

    async def get(self) -> TrainBatch:
        """The next batch, or the error that ended the stream."""
        item = await self._ready.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def fetch(self, step: Step) -> TrainBatch:
        """This rank's part of the batch of ``step``: all of it for the only rank. ``NoBatch`` if there can be none."""
        ask = NextBatch(trainer_term=self._trainer_term, step=step, rank=self._rank)
        backoff, attempt = Backoff(0.05, 1.0), 0
        while True:
            batch = await self._batch(ask)
            try:
                groups = await self._members(self._mine(batch.members))
            except Refused as refused:
                if refused.code is Code.FENCED:
                    raise
                attempt += 1
                log.warning("batch %d of step %d cannot be fetched, asking again: %s", batch.batch, step, refused)
                await asyncio.sleep(backoff.delay_s(attempt))
                continue
            return await asyncio.to_thread(assemble, batch, groups)

    async def _batch(self, ask: NextBatch) -> Batch:
        try:
            return await self._scheduler.ask(ask, Batch, timeout_s=None)
        except Refused as refused:
            if refused.code is Code.DENIED:
                raise NoBatch(refused.detail) from refused
            raise

    def _mine(self, members: Sequence[MemberRef]) -> Sequence[MemberRef]:
        """Whole groups, about equally many tokens a rank; every rank works out the same."""
        if len(members) < self._world:
            raise ProtocolError(Code.MALFORMED, f"{len(members)} groups are too few for {self._world} ranks")
        places = shares([member.tokens for member in members], self._world)[self._rank]
        return [members[place] for place in places]

    async def _members(self, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        """Every one of them, in that order; all shards at once."""
        calls = [asyncio.create_task(self._fetch(shard, part)) for shard, part in requests(members)]
        try:
            parts = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        found = {item.group: item for part in parts for item in part}
        return [found[member.group] for member in members]

    async def _fetch(self, shard: int, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        ask = FetchGroups(groups=[member.group for member in members], shas=[member.sha for member in members])
        reply, frames = await self._shards[shard].call(ask, timeout_s=None)
        if not isinstance(reply, Groups) or [item.group for item in reply.groups] != ask.groups:
            raise ProtocolError(Code.MALFORMED, f"shard {shard} did not answer with the groups it was asked for")
        return list(unpacked(reply, frames))


def requests(members: Sequence[MemberRef]) -> Iterator[tuple[int, list[MemberRef]]]:
    """(shard, members) of each request, within the sizes of one message."""
    part: list[MemberRef] = []
    tokens = 0
    for member in sorted(members, key=lambda member: member.shard):
        full = len(part) >= FETCH_GROUPS or tokens + member.tokens > FETCH_TOKENS
        if part and (full or member.shard != part[0].shard):
            yield part[0].shard, part
            part, tokens = [], 0
        part.append(member)
        tokens += member.tokens
    if part:
        yield part[0].shard, part


def unpacked(reply: Groups, frames: Sequence[memoryview]) -> Iterator[FetchedGroup]:
    """The groups of an answer, checked; ``ProtocolError`` when frames and headers disagree."""
    start = 0
    for item in reply.groups:
        end = start + len(item.frames)
        payload = GroupPayload.from_arrays(arrays(item.frames, frames[start:end]))
        yield FetchedGroup(group=GroupId(item.group), row=item.row, payload=payload)
        start = end
