"""Groups that change their instance: their samples so far travel through the group's shard, with its prompt row.

A group that could not leave stays under its lease with all its tokens. A group whose samples were lost on the way
starts over under its new lease. Either way, only one worker generates under each lease.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from staleflow.clients.rollout.groups import PartialGroup, Recipe
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
    Result,
    Results,
    Rows,
)
from staleflow.protocols.wire.partial_samples import check_partial, partial_sha
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.tensors import specs_and_frames

log = logging.getLogger(__name__)

PUT_TIMEOUT_S = 2.0
"""Maximum time for a shard to accept samples; a slower shard is too busy, and the group stays."""
MAX_ROWS_BYTES = 64 << 20
"""Maximum bytes of one reply."""


async def hand_over(
    assign: Assign, group: PartialGroup, shard: Client, scheduler: Client, *, any_target: bool = False
) -> bool:
    """Give up a group that must leave. Return True if its lease is over, False if the group continues here.

    ``any_target``: the scheduler has ordered no move and chooses the worker.
    """
    try:
        result = await register(await store(assign, group, shard, any_target=any_target), scheduler)
    except (Refused, Unavailable) as no:
        log.info("group %d, lease %d stays here: %s", assign.group, assign.lease, no)
        return False
    if result.code in (None, Code.STALE_LEASE):
        return True
    log.info("group %d, lease %d stays here: %s", assign.group, assign.lease, result.detail)
    return False


async def store(assign: Assign, group: PartialGroup, shard: Client, *, any_target: bool = False) -> RegisterYield:
    """Store a group in its current state at its shard; return the operation that moves it.

    ``any_target``: the scheduler has ordered no move and chooses the worker. Raise ``Refused`` or ``Unavailable``.
    """
    specs, frames = specs_and_frames(group.payload.to_arrays())
    partial = PartialFrames(origin=group.origin, frames=specs)
    put = PutPartial(group=assign.group, lease=assign.lease, partial=partial)
    lineage, version = group.newest() or (assign.lineage, assign.version)
    op = RegisterYield(
        group=assign.group,
        lease=assign.lease,
        lineage=lineage,
        version=version,
        sha=partial_sha(partial, frames),
        any_target=any_target,
    )
    await shard.ask(put, Done, frames, timeout_s=PUT_TIMEOUT_S)
    return op


async def register(op: RegisterYield, scheduler: Client) -> Result:
    """Let the scheduler move a group that is stored at its shard."""
    # Only the scheduler decides whether the group has left, so wait without a limit: two workers must never generate
    # under one lease.
    return (await scheduler.ask(Operations(ops=[op]), Results, timeout_s=None)).results[0]


async def fetch_rows(
    shard: Client, portion: AdaptiveChunk, assigns: Sequence[Assign], recipe: Recipe
) -> tuple[list[dict[str, Any]], dict[LeaseId, PartialGroup]]:
    """Return the prompt row of each group, and the partial samples of other instances by lease.

    Requests are split so that each reply is small enough for the connection to carry in a moment. Raise ``Refused``.
    """
    rows: list[dict[str, Any]] = []
    partials: dict[LeaseId, PartialGroup] = {}
    while rest := assigns[len(rows) :]:
        try:
            answer, frames = await _request_rows(shard, portion, rest)
        except Stuck:
            continue
        partials |= _partials(rest, answer, frames, recipe)
        rows += answer.rows
    return rows, partials


async def _request_rows(
    shard: Client, portion: AdaptiveChunk, assigns: Sequence[Assign]
) -> tuple[Rows, list[memoryview]]:
    """Request the rows of these groups; the reply may cover only the first ones. Raise ``Refused`` or ``Stuck``."""
    partials = [assign.partial for assign in assigns] if any(assign.partial for assign in assigns) else []
    ask = GetRows(groups=[assign.group for assign in assigns], partials=partials, most_bytes=portion.nbytes)
    clock = asyncio.get_running_loop().time
    began, call = clock(), shard.call(ask, timeout_s=None)
    answer, frames = await portion.watch(shard, call, ask.most_bytes, divisible=len(assigns) > 1)
    if not isinstance(answer, Rows) or not 0 < len(answer.rows) <= len(assigns):
        raise Refused(Code.MALFORMED, f"{shard.address} did not reply with the requested rows")
    whole = len(answer.rows) == len(assigns)
    portion.took(sum(frame.nbytes for frame in frames) if whole else ask.most_bytes, clock() - began)
    return answer, frames


def _partials(
    assigns: Sequence[Assign], answer: Rows, frames: Sequence[memoryview], recipe: Recipe
) -> dict[LeaseId, PartialGroup]:
    """Return the partial samples by lease, checked against the hash that the earlier worker sent to the scheduler."""
    partials: dict[LeaseId, PartialGroup] = {}
    limits = PayloadLimits(sampled_tokens=recipe.sampling.max_new_tokens, columns=recipe.columns)
    start = 0
    for assign, partial in zip(assigns, answer.partials, strict=False):
        if partial is not None:
            end = start + len(partial.frames)
            try:
                mine = frames[start:end]
                if partial_sha(partial, mine) != assign.partial_sha:
                    raise ProtocolError(Code.CONFLICT, f"the samples of lease {assign.partial} do not match their hash")
                payload = check_partial(partial, mine, lease=assign.partial, limits=limits, samples=recipe.started)
                partials[assign.lease] = PartialGroup(origin=partial.origin, payload=payload)
            except ProtocolError as error:
                log.warning("group %d starts over: %s", assign.group, error)
            start = end
        elif assign.partial:
            log.info("group %d starts over: the samples of lease %d are lost", assign.group, assign.partial)
    return partials
