"""Prefetch of sealed batches: during a step, the next batch is awaited, fetched and assembled.

Consumes: ``Batch`` of the scheduler, then this rank's members from all shards in parallel. Produces: ``TrainBatch``, in
order of steps. Waits for the seal, which the ledger allows at most one step ahead. A batch that changes meanwhile (a
corrupt member is quarantined, the batch is sealed again) is requested again.
"""

import asyncio
import heapq
import logging
from collections.abc import Sequence

from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble
from staleflow.clients.trainer.data.fetch import Fetcher
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.net.retry import Backoff
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, Step, TrainerTerm
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import (
    Batch,
    CheckBatch,
    Done,
    GetBatch,
    GetClaims,
    MemberRef,
    ModelLimits,
    NoMoreBatches,
    QuarantineGroups,
    Reply,
)
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.routed_experts import COLUMN as ROUTED_EXPERTS
from staleflow.protocols.wire.routed_experts import unlike_most

log = logging.getLogger(__name__)


class Drained(Exception):
    """The run drains normally and has no further batch; the text is the reason."""


class NoBatch(Exception):
    """The batch of a step can never arrive, according to the scheduler; the text is the reason."""


class BatchStream:
    """Feeds one trainer term. ``get`` supports one reader."""

    def __init__(
        self,
        scheduler: Client,
        shards: Sequence[Client],
        trainer_term: TrainerTerm,
        *,
        rank: int = 0,
        world: int = 1,
        mapped: bool = True,
        model: ModelLimits | None = None,
    ) -> None:
        """``mapped``: map payload on this host instead of receiving it. ``model``: its limits; None: no limits."""
        self._scheduler = scheduler
        self._fetcher = Fetcher(shards, mapped=mapped)
        self._trainer_term = trainer_term
        self._rank = rank
        self._world = world
        self._limits = PayloadLimits(model=model or ModelLimits())
        self._ready: asyncio.Queue[TrainBatch | Exception] = asyncio.Queue(maxsize=1)

    async def feed(self, first: Step, end: int) -> None:
        """Fetch the batches of steps ``first .. end - 1``; an error is passed to the reader and ends the stream."""
        try:
            for step in range(first, end):
                await self._ready.put(await self.fetch(Step(step)))
        except Exception as error:  # passed to the training thread, which waits in ``get``
            await self._ready.put(error)

    async def get(self) -> TrainBatch:
        """Return the next batch, or raise the error that ended the stream."""
        item = await self._ready.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def fetch(self, step: Step) -> TrainBatch:
        """Return this rank's part of the batch of ``step``; a single rank gets all of it.

        Raise ``NoBatch`` or ``Drained`` if none will come.
        """
        batch, groups = await self.groups(step)
        return await asyncio.to_thread(assemble, batch, groups)

    async def groups(self, step: Step) -> tuple[Batch, list[FetchedGroup]]:
        """Return the batch of ``step`` and this rank's groups, before assembly."""
        backoff, attempt = Backoff(0.05, 1.0), 0
        while True:
            batch = await self.sealed(step)
            try:
                return batch, await self._trainable(batch.members)
            except Refused as refused:
                if refused.code is Code.FENCED:
                    raise
                attempt += 1
                log.warning("batch %d of step %d cannot be fetched, retrying: %s", batch.batch, step, refused)
                await asyncio.sleep(backoff.delay_s(attempt))

    async def sealed(self, step: Step) -> Batch:
        """Wait for the seal of ``step`` and return its current batch. ``NoBatch`` or ``Drained`` if none will come."""
        reply = await self.next(GetBatch(trainer_term=self._trainer_term, step=step, rank=self._rank))
        if not isinstance(reply, Batch):
            raise ProtocolError(Code.MALFORMED, f"the scheduler replied to GetBatch with {type(reply).__name__}")
        return reply

    async def next(self, ask: GetBatch | GetClaims) -> Reply:
        """Send a request for the next data and return the reply. ``NoBatch`` or ``Drained`` if none will come."""
        try:
            reply, _ = await self._scheduler.call(ask, timeout_s=None)
        except Refused as refused:
            if refused.code is Code.DENIED:
                raise NoBatch(refused.detail) from refused
            raise
        if isinstance(reply, NoMoreBatches):
            raise Drained(reply.why)
        return reply

    async def is_current(self, batch: TrainBatch | Batch) -> bool:
        """Return whether the batch is still its step's; a corrupt member revokes even a prefetched batch."""
        check = CheckBatch(trainer_term=self._trainer_term, step=batch.step, batch=batch.batch)
        try:
            await self._scheduler.ask(check, Done, timeout_s=None)
        except Refused as refused:
            if refused.code is not Code.CONFLICT:
                raise
            return False
        return True

    def _mine(self, members: Sequence[MemberRef]) -> Sequence[MemberRef]:
        """Return this rank's whole groups, balanced by tokens; every rank computes the same partition."""
        if len(members) < self._world:
            raise ProtocolError(Code.MALFORMED, f"{len(members)} groups are too few for {self._world} ranks")
        places = shares([member.sequence_tokens for member in members], self._world)[self._rank]
        return [members[place] for place in places]

    async def _trainable(self, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        """Fetch this rank's groups. Raise ``Refused`` after quarantining groups that exceed the model's limits.

        A trajectory server performs the same check on a push; this one covers groups pushed before it knew the model.
        """
        groups = await self._members(self._mine(members))
        bad: list[GroupId] = []
        why = ""
        unlike: dict[GroupId, str] = {}
        if not self._limits.model.experts:
            recorded = [item for item in groups if ROUTED_EXPERTS.key in item.payload.columns]
            odd = unlike_most([item.payload.columns[ROUTED_EXPERTS.key] for item in recorded])
            unlike = {recorded[place].group: reason for place, reason in odd.items()}
        for item in groups:
            try:
                self._limits.check_tokens(item.payload)
            except ProtocolError as error:
                bad.append(item.group)
                why = error.detail
            else:
                if item.group in unlike:
                    bad.append(item.group)
                    why = unlike[item.group]
        if bad:
            await self.quarantine(bad, why)
            raise Refused(
                Code.STALE, f"groups {', '.join(map(str, bad))} cannot be trained: {why}; they are quarantined"
            )
        return groups

    async def quarantine(self, groups: Sequence[GroupId], why: str) -> None:
        """Report untrainable groups; the batch is sealed again without them. ``NoBatch`` if there are too many."""
        ask = QuarantineGroups(trainer_term=self._trainer_term, groups=list(groups), why=why)
        try:
            await self._scheduler.ask(ask, Done, timeout_s=None)
        except Refused as refused:
            if refused.code is Code.DENIED:
                raise NoBatch(refused.detail) from refused
            raise

    async def _members(self, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        """Return all members in order, from all shards in parallel."""
        return await self._fetcher.members(members)


def shares(tokens: Sequence[int], world: int) -> list[list[int]]:
    """Return the positions of each rank's groups, ascending; no rank is empty if there are as many groups as ranks.

    The longest group goes first, each to the rank with the fewest tokens so far, which is at most a third above the
    optimum (Graham 1969, "Bounds on multiprocessing timing anomalies"). The result depends only on ``tokens`` and
    ``world``, so that every rank computes the same.
    """
    loads = [(0, 0, rank) for rank in range(world)]
    mine: list[list[int]] = [[] for _ in range(world)]
    for place in sorted(range(len(tokens)), key=lambda place: (-tokens[place], place)):
        load, count, rank = heapq.heappop(loads)
        mine[rank].append(place)
        heapq.heappush(loads, (load + tokens[place], count + 1, rank))
    return [sorted(places) for places in mine]
