"""Batches in pieces, handed out while they still fill: for a trainer that streams.

Consumes: groups that the ledger fixed as the beginning of the batch (``Claims``), at last the sealed ``Batch``.
Produces: ``Piece``, in the order of the batch. The cut depends on that order alone, every ``size`` groups, however
early or late the groups came: whoever is served the batch again gets the same pieces. When what was handed out is no
longer how the batch begins (a rollback, a corrupt group), the step begins again with a piece that is ``first``.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.trainer.data.batch import NO_VERSION, TrainBatch, assemble
from staleflow.clients.trainer.prefetch import BatchStream
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.net.retry import Backoff
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, Step, TrainerTerm
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Batch, Claims, GetClaims, MemberRef, ModelLimits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some whole groups of one step's batch."""

    data: TrainBatch
    """Their rows. ``batch`` is 0 and ``digest`` empty: the batch is not sealed yet, or this is only a part of it."""
    first: bool
    """A step begins, or begins again: whatever was made of earlier pieces of it is void."""
    batch: Batch | None
    """With the last piece: the sealed batch, which may be committed now."""
    header: Batch
    """Its groups, on all ranks: ``data`` has this rank's share of them."""


class PieceStream(BatchStream):
    """Feeds one trainer term; rank 0 alone asks for pieces. ``piece`` is for one reader."""

    def __init__(
        self,
        scheduler: Client,
        shards: Sequence[Client],
        trainer_term: TrainerTerm,
        *,
        size: int,
        rank: int = 0,
        world: int = 1,
        model: ModelLimits | None = None,
    ) -> None:
        super().__init__(scheduler, shards, trainer_term, rank=rank, world=world, model=model)
        self._size = size
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue(maxsize=1)

    async def feed_pieces(self, first: Step, end: int) -> None:
        """Fetch the pieces of steps ``first .. end - 1``; an error is handed to the reader and ends the stream."""
        try:
            for step in range(first, end):
                async with aclosing(self.pieces(Step(step))) as pieces:
                    async for piece in pieces:
                        await self._pieces.put(piece)
        except Exception as error:  # it belongs to the training thread, which waits in ``piece``
            await self._pieces.put(error)

    async def piece(self) -> Piece:
        """The next piece, or the error that ended the stream."""
        item = await self._pieces.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def pieces(self, step: Step) -> AsyncGenerator[Piece]:
        """Those of one step, up to the last; ``NoBatch`` and ``Drained`` if it can never be whole."""
        held: list[MemberRef] = []
        backoff, attempt = Backoff(0.05, 1.0), 0
        while True:
            answer = await self._more(step, held)
            sealed = answer if isinstance(answer, Batch) else None
            begins = sealed is None or (sealed.members[: len(held)] == held and len(held) < len(sealed.members))
            if answer is None or not begins:
                log.warning("step %d begins again: its batch no longer begins with the %d groups held", step, len(held))
                held = []
                continue
            members = answer.members if sealed is None else answer.members[len(held) :]
            for start in range(0, len(members), self._size):
                part = members[start : start + self._size]
                header = _header(answer, part)
                data = await self.data(header)
                if data is None:
                    attempt += 1
                    held = []
                    await asyncio.sleep(backoff.delay_s(attempt))
                    break
                ends = sealed is not None and start + self._size >= len(members)
                yield Piece(data=data, first=not held, batch=sealed if ends else None, header=header)
                if ends:
                    return
                held += part

    async def _more(self, step: Step, held: Sequence[MemberRef]) -> Batch | Claims | None:
        """What comes next; None when ``held`` is no longer how the batch begins."""
        leases = [member.lease for member in held]
        ask = GetClaims(trainer_term=self._trainer_term, step=step, held=leases, count=self._size)
        try:
            reply = await self.next(ask)
        except Refused as refused:
            if refused.code is Code.CONFLICT:
                return None
            raise
        if not isinstance(reply, Claims | Batch):
            raise ProtocolError(Code.MALFORMED, f"the scheduler answered NextGroups with {type(reply).__name__}")
        return reply

    async def data(self, header: Batch) -> TrainBatch | None:
        """This rank's share of a piece's rows; None when a group cannot be fetched, and the batch will change."""
        try:
            groups = await self._trainable(header.members)
        except Refused as refused:
            if refused.code is Code.FENCED:
                raise
            log.warning("a piece of step %d cannot be fetched, it begins again: %s", header.step, refused)
            return None
        return await asyncio.to_thread(assemble, header, groups)


def _header(answer: Batch | Claims, members: Sequence[MemberRef]) -> Batch:
    """Some groups as if they were a batch, which has no number and no digest."""
    return Batch(
        batch=BatchId(0),
        lineage=answer.lineage,
        step=answer.step,
        attempt=0,
        members=list(members),
        digest="",
        mask_below=answer.mask_below,
    )


def joined(parts: Sequence[TrainBatch], batch: Batch) -> TrainBatch:
    """All pieces of a step as the batch that they are, row for row what is fetched when it comes in one."""
    longest = max(part.input_ids.shape[1] for part in parts)

    def column(name: str, fill: int = 0) -> NDArray[Any]:
        return np.concatenate([_padded(getattr(part, name), longest, fill) for part in parts])

    tokens = dict.fromkeys(name for part in parts for name in part.token_stages)
    samples = dict.fromkeys(name for part in parts for name in part.sample_stages)
    return replace(
        parts[0],
        batch=batch.batch,
        lineage=batch.lineage,
        digest=batch.digest,
        attempt=batch.attempt,
        input_ids=column("input_ids"),
        attention_mask=column("attention_mask"),
        loss_mask=column("loss_mask"),
        behavior_logprobs=column("behavior_logprobs"),
        token_versions=column("token_versions", NO_VERSION),
        rewards=column("rewards"),
        group_ids=column("group_ids"),
        completion_lengths=column("completion_lengths"),
        cut=column("cut"),
        masked_tokens=sum(part.masked_tokens for part in parts),
        rows=tuple(row for part in parts for row in part.rows),
        token_stages={name: np.concatenate([_of_tokens(part, name, longest) for part in parts]) for name in tokens},
        sample_stages={name: np.concatenate([_of_samples(part, name) for part in parts]) for name in samples},
    )


def _padded(array: NDArray[Any], longest: int, fill: int) -> NDArray[Any]:
    """[N, L] to [N, longest]; [N] as it is."""
    if array.ndim == 1 or array.shape[1] == longest:
        return array
    return np.pad(array, ((0, 0), (0, longest - array.shape[1])), constant_values=fill)


def _of_tokens(part: TrainBatch, name: str, longest: int) -> NDArray[np.float32]:
    found = part.token_stages.get(name)
    return np.zeros((len(part.rewards), longest), np.float32) if found is None else _padded(found, longest, 0)


def _of_samples(part: TrainBatch, name: str) -> NDArray[np.float32]:
    found = part.sample_stages.get(name)
    return np.full(len(part.rewards), np.nan, np.float32) if found is None else found
