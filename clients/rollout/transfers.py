"""Groups that change their instance: what was written goes to the group's shard and comes from there with its row.

A group that could not leave stays, under its lease, with everything it has. One whose samples were lost on the way is
begun anew under its new lease. Either way each lease is written by one worker.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from staleflow.clients.rollout.groups import Begun, Recipe
from staleflow.net.adaptive_chunks import AdaptiveChunk, Stuck
from staleflow.net.client import Client
from staleflow.net.errors import Refused, Unavailable
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import LeaseId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import (
    Assign,
    Done,
    GetRows,
    Operations,
    PartialFrames,
    PutPartial,
    RegisterYield,
    Results,
    Rows,
)
from staleflow.protocols.wire.partial_samples import check_partial, partial_sha
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.tensors import specs_and_frames

log = logging.getLogger(__name__)

PUT_S = 2.0
"""A shard that takes longer to take samples over is too busy: the group stays."""
ROWS_BYTES = 64 << 20
"""Most of one answer."""


async def hand_over(assign: Assign, begun: Begun, shard: Client, scheduler: Client) -> bool:
    """Give a group up as it stands. True when its lease is over; False when the group is to go on here."""
    specs, frames = specs_and_frames(begun.payload.to_arrays())
    partial = PartialFrames(origin=begun.origin, frames=specs)
    put = PutPartial(group=assign.group, lease=assign.lease, partial=partial)
    lineage, version = begun.newest() or (assign.lineage, assign.version)
    op = RegisterYield(
        group=assign.group, lease=assign.lease, lineage=lineage, version=version, sha=partial_sha(partial, frames)
    )
    try:
        await shard.ask(put, Done, frames, timeout_s=PUT_S)
        # Whether it has left is for the scheduler to say, however long that takes: two must not write under one lease.
        result = (await scheduler.ask(Operations(ops=[op]), Results, timeout_s=None)).results[0]
    except (Refused, Unavailable) as no:
        log.info("group %d, lease %d, stays: %s", assign.group, assign.lease, no)
        return False
    if result.code in (None, Code.STALE_LEASE):
        return True
    log.info("group %d, lease %d, stays: %s", assign.group, assign.lease, result.detail)
    return False


async def arrived(
    shard: Client, portion: AdaptiveChunk, assigns: Sequence[Assign], recipe: Recipe
) -> tuple[list[dict[str, Any]], dict[LeaseId, Begun]]:
    """The prompt row of each, and by lease what other instances wrote of them; as many at once as the connection
    carries in a moment. ``Refused``."""
    rows: list[dict[str, Any]] = []
    begun: dict[LeaseId, Begun] = {}
    while rest := assigns[len(rows) :]:
        try:
            answer, frames = await _asked(shard, portion, rest)
        except Stuck:
            continue
        begun |= _begun(rest, answer, frames, recipe)
        rows += answer.rows
    return rows, begun


async def _asked(shard: Client, portion: AdaptiveChunk, assigns: Sequence[Assign]) -> tuple[Rows, list[memoryview]]:
    """What the shard has of the first of these. ``Refused``, ``Stuck``."""
    partials = [assign.partial for assign in assigns] if any(assign.partial for assign in assigns) else []
    ask = GetRows(groups=[assign.group for assign in assigns], partials=partials, most_bytes=portion.nbytes)
    clock = asyncio.get_running_loop().time
    began, call = clock(), shard.call(ask, timeout_s=None)
    answer, frames = await portion.watch(shard, call, ask.most_bytes, divisible=len(assigns) > 1)
    if not isinstance(answer, Rows) or not 0 < len(answer.rows) <= len(assigns):
        raise Refused(Code.MALFORMED, f"{shard.address} did not answer with the rows it was asked for")
    whole = len(answer.rows) == len(assigns)
    portion.took(sum(frame.nbytes for frame in frames) if whole else ask.most_bytes, clock() - began)
    return answer, frames


def _begun(
    assigns: Sequence[Assign], answer: Rows, frames: Sequence[memoryview], recipe: Recipe
) -> dict[LeaseId, Begun]:
    """By lease, what other instances wrote of the first of these: exactly what they told the scheduler."""
    begun: dict[LeaseId, Begun] = {}
    limits = PayloadLimits(sampled_tokens=recipe.sampling.max_new_tokens)
    start = 0
    for assign, partial in zip(assigns, answer.partials, strict=False):
        if partial is not None:
            end = start + len(partial.frames)
            try:
                mine = frames[start:end]
                if partial_sha(partial, mine) != assign.partial_sha:
                    raise ProtocolError(Code.CONFLICT, f"lease {assign.partial} wrote something else than what came")
                payload = check_partial(partial, mine, lease=assign.partial, limits=limits, samples=recipe.started)
                begun[assign.lease] = Begun(origin=partial.origin, payload=payload)
            except ProtocolError as error:
                log.warning("group %d begins anew: %s", assign.group, error)
            start = end
        elif assign.partial:
            log.info("group %d begins anew: what lease %d wrote is lost", assign.group, assign.partial)
    return begun
