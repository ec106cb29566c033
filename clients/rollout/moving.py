"""Groups that change their instance: what was written goes to the group's shard and comes from there.

A group that could not leave stays, under its lease, with everything it has. One whose samples were lost on the way is
begun anew under its new lease. Either way each lease is written by one worker.
"""

import logging
from collections.abc import Sequence
from typing import Any

from staleflow.clients.rollout.groups import Begun
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
from staleflow.protocols.wire.tensors import arrays, specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.runtime.client import Client
from staleflow.runtime.errors import Refused, Unavailable

log = logging.getLogger(__name__)

PUT_S = 2.0
"""A shard that takes longer to take samples over is too busy: the group stays."""


async def hand_over(assign: Assign, begun: Begun, shard: Client, scheduler: Client) -> bool:
    """Give a group up as it stands. True when its lease is over; False when the group is to go on here."""
    specs, frames = specs_and_frames(begun.payload.to_arrays())
    partial = PartialFrames(origin=begun.origin, frames=specs)
    put = PutPartial(group=assign.group, lease=assign.lease, partial=partial)
    lineage, version = begun.newest() or (assign.lineage, assign.version)
    op = RegisterYield(group=assign.group, lease=assign.lease, lineage=lineage, version=version)
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


async def arrived(shard: Client, assigns: Sequence[Assign]) -> tuple[list[dict[str, Any]], dict[LeaseId, Begun]]:
    """The prompt row of each, and by lease what other instances wrote of them. ``Refused``."""
    partials = [assign.partial for assign in assigns] if any(assign.partial for assign in assigns) else []
    ask = GetRows(groups=[assign.group for assign in assigns], partials=partials)
    answer, frames = await shard.call(ask, timeout_s=None)
    if not isinstance(answer, Rows) or len(answer.rows) != len(assigns):
        raise Refused(Code.MALFORMED, f"{shard.address} did not answer with the rows it was asked for")
    begun: dict[LeaseId, Begun] = {}
    start = 0
    for assign, partial in zip(assigns, answer.partials, strict=False):
        if partial is not None:
            end = start + len(partial.frames)
            try:
                payload = GroupPayload.from_arrays(arrays(partial.frames, frames[start:end]))
                begun[assign.lease] = Begun(origin=partial.origin, payload=payload)
            except ProtocolError as error:
                log.warning("group %d begins anew: %s", assign.group, error)
            start = end
        elif assign.partial:
            log.info("group %d begins anew: what lease %d wrote is lost", assign.group, assign.partial)
    return answer.rows, begun
