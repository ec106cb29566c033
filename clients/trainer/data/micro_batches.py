"""Micro-batches of a batch that is still filling, for a trainer that streams.

Consumes groups that the ledger fixed as the beginning of the batch (``Claims``), and finally the sealed ``Batch``.
Produces each ``MicroBatch``, in the order of the batch. The split depends only on that order (every ``size`` groups),
not on arrival times, so that a batch that is served again gives the same micro-batches. If the groups already returned
are no longer the beginning of the batch (a rollback, a corrupt group), the step restarts with a micro-batch marked
``first``.
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
from staleflow.clients.trainer.data.prefetch import BatchStream
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.net.retry import Backoff
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, Step, TrainerTerm
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Batch, Claims, GetClaims, MemberRef, ModelLimits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some whole groups of one step's batch."""

    data: TrainBatch
    """Rows of these groups. ``batch`` is 0 and ``digest`` empty, as the batch may be unsealed and this is a part."""
    first: bool
    """The step starts or restarts: results of its earlier micro-batches are void."""
    batch: Batch | None
    """The sealed batch, with the last micro-batch only; it may be committed now."""
    header: Batch
    """The groups on all ranks; ``data`` has this rank's share of them."""


class MicroBatchStream(BatchStream):
    """Feeds one trainer term; only rank 0 requests micro-batches. ``micro_batch`` supports one reader."""

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
        self._micro_batches: asyncio.Queue[MicroBatch | Exception] = asyncio.Queue(maxsize=1)

    async def feed_micro_batches(self, first: Step, end: int) -> None:
        """Fetch the micro-batches of steps ``first .. end - 1``; an error goes to the reader and ends the stream."""
        try:
            for step in range(first, end):
                async with aclosing(self.micro_batches(Step(step))) as micro_batches:
                    async for micro_batch in micro_batches:
                        await self._micro_batches.put(micro_batch)
        except Exception as error:  # passed to the training thread, which waits in ``micro_batch``
            await self._micro_batches.put(error)

    async def micro_batch(self) -> MicroBatch:
        """Return the next micro-batch, or raise the error that ended the stream."""
        item = await self._micro_batches.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def micro_batches(self, step: Step) -> AsyncGenerator[MicroBatch]:
        """Yield the micro-batches of one step; ``NoBatch`` or ``Drained`` if it can never be complete."""
        delivered: list[MemberRef] = []
        backoff, attempt = Backoff(0.05, 1.0), 0
        while True:
            answer = await self._more(step, delivered)
            sealed = answer if isinstance(answer, Batch) else None
            begins = sealed is None or (
                sealed.members[: len(delivered)] == delivered and len(delivered) < len(sealed.members)
            )
            if answer is None or not begins:
                log.warning(
                    "step %d restarts: its batch no longer begins with its first %d groups", step, len(delivered)
                )
                delivered = []
                continue
            members = answer.members if sealed is None else answer.members[len(delivered) :]
            for start in range(0, len(members), self._size):
                part = members[start : start + self._size]
                header = _header(answer, part)
                data = await self.data(header)
                if data is None:
                    attempt += 1
                    delivered = []
                    await asyncio.sleep(backoff.delay_s(attempt))
                    break
                ends = sealed is not None and start + self._size >= len(members)
                yield MicroBatch(data=data, first=not delivered, batch=sealed if ends else None, header=header)
                if ends:
                    return
                delivered += part

    async def _more(self, step: Step, delivered: Sequence[MemberRef]) -> Batch | Claims | None:
        """Request the next groups; return None if the batch no longer begins with ``delivered``."""
        leases = [member.lease for member in delivered]
        ask = GetClaims(trainer_term=self._trainer_term, step=step, held=leases, count=self._size)
        try:
            reply = await self.next(ask)
        except Refused as refused:
            if refused.code is Code.CONFLICT:
                return None
            raise
        if not isinstance(reply, Claims | Batch):
            raise ProtocolError(Code.MALFORMED, f"the scheduler replied to GetClaims with {type(reply).__name__}")
        return reply

    async def data(self, header: Batch) -> TrainBatch | None:
        """Return this rank's rows of a micro-batch; None if a group cannot be fetched, and the batch will change."""
        try:
            groups = await self._trainable(header.members)
        except Refused as refused:
            if refused.code is Code.FENCED:
                raise
            log.warning("step %d restarts: a micro-batch cannot be fetched: %s", header.step, refused)
            return None
        return await asyncio.to_thread(assemble, header, groups)


def _header(answer: Batch | Claims, members: Sequence[MemberRef]) -> Batch:
    """Wrap some groups as a batch without number and digest."""
    return Batch(
        batch=BatchId(0),
        lineage=answer.lineage,
        step=answer.step,
        attempt=0,
        members=list(members),
        digest="",
        mask_below=answer.mask_below,
    )


def concatenated(parts: Sequence[TrainBatch], batch: Batch | TrainBatch) -> TrainBatch:
    """Concatenate all micro-batches of a step; row for row equal to the batch fetched in one."""
    longest = max(part.input_ids.shape[1] for part in parts)

    def column(name: str, fill: int = 0) -> NDArray[Any]:
        return np.concatenate([_padded(getattr(part, name), longest, fill) for part in parts])

    tokens = dict.fromkeys(name for part in parts for name in part.token_stages)
    samples = dict.fromkeys(name for part in parts for name in part.sample_stages)
    rows = [len(part.rewards) for part in parts]
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
        token_columns=_joined([part.token_columns for part in parts], rows, longest),
        sample_columns=_joined([part.sample_columns for part in parts], rows),
    )


def _padded(array: NDArray[Any], longest: int, fill: int) -> NDArray[Any]:
    """Pad [N, L] to [N, longest]; return [N] unchanged."""
    if array.ndim == 1 or array.shape[1] == longest:
        return array
    return np.pad(array, ((0, 0), (0, longest - array.shape[1])), constant_values=fill)


def _joined(
    parts: Sequence[dict[str, NDArray[Any]]], rows: Sequence[int], longest: int | None = None
) -> dict[str, NDArray[Any]]:
    """Concatenate the typed columns of parts with ``rows`` rows. Rows of a part without a column are 0 or empty.

    ``longest``: the columns have one value a token and are padded to this length.
    """
    joined: dict[str, NDArray[Any]] = {}
    for name, like in {name: array for part in parts for name, array in part.items()}.items():
        shape = like.shape[1:] if longest is None else (longest, *like.shape[2:])
        joined[name] = np.full((sum(rows), *shape), b"" if like.dtype == object else 0, like.dtype)
        start = 0
        for part, count in zip(parts, rows, strict=True):
            if (array := part.get(name)) is not None:
                share = joined[name][start : start + count]
                (share if longest is None else share[:, : array.shape[1]])[:] = array
            start += count
    return joined


def _of_tokens(part: TrainBatch, name: str, longest: int) -> NDArray[np.float32]:
    column = part.token_stages.get(name)
    return np.zeros((len(part.rewards), longest), np.float32) if column is None else _padded(column, longest, 0)


def _of_samples(part: TrainBatch, name: str) -> NDArray[np.float32]:
    column = part.sample_stages.get(name)
    return np.full(len(part.rewards), np.nan, np.float32) if column is None else column
