"""The payload of a batch's members, straight from their shards, all of them at once.

From a shard on this host only names of places come, and what lies there is mapped; from others the bytes come in
frames, as they are stored. Either way they are checked here before anybody sees them. Where that fails, the shard is
asked for bytes that it has checked itself, and so finds out what is damaged.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence

from staleflow.clients.mapped import MappedSlabs, Unreadable, checked
from staleflow.clients.trainer.batches import FetchedGroup
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.columns import parted
from staleflow.protocols.wire.messages import FetchGroups, Groups, MemberRef
from staleflow.protocols.wire.tensors import Array, arrays
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.runtime.client import Client
from staleflow.runtime.host import boot_id

log = logging.getLogger(__name__)

FETCH_GROUPS = 512
"""Most members of one request; eight frames each stay far below the transport's limit."""
FETCH_TOKENS = 4 << 20
"""Most tokens of one request; some ten bytes each."""

AT_ONCE_TOKENS = 100_000
"""Fewer than these are checked at once; more in a thread, so that the loop goes on meanwhile."""


class Fetcher:
    """Owned by one stream. ``mapped``: on a shard's host its slabs are mapped."""

    def __init__(self, shards: Sequence[Client], *, mapped: bool = True) -> None:
        self._shards = shards
        self._maps = [MappedSlabs() if mapped else None for _ in shards]

    async def members(self, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        """Every one of them, in that order. ``Refused`` if a shard has not got one, or a corrupt one."""
        calls = [asyncio.create_task(self._fetch(shard, part)) for shard, part in requests(members)]
        try:
            parts = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        found = {item.group: item for part in parts for item in part}
        return [found[member.group] for member in members]

    async def _fetch(self, shard: int, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        try:
            return await self._asked(shard, members, self._maps[shard], checks=True)
        except Unreadable as error:
            log.info("shard %d is asked to check what it has: %s", shard, error)
        return await self._asked(shard, members, None, checks=False)

    async def _asked(
        self, shard: int, members: Sequence[MemberRef], maps: MappedSlabs | None, *, checks: bool
    ) -> list[FetchedGroup]:
        ask = FetchGroups(
            groups=[member.group for member in members],
            shas=[member.sha for member in members],
            host="" if maps is None else boot_id(),
            checks=checks,
        )
        reply, frames = await self._shards[shard].call(ask, timeout_s=None)
        if not isinstance(reply, Groups) or [item.group for item in reply.groups] != ask.groups:
            raise ProtocolError(Code.MALFORMED, f"shard {shard} did not answer with the groups it was asked for")
        if maps is None and any(item.place is not None for item in reply.groups):
            raise ProtocolError(Code.MALFORMED, f"shard {shard} answered with places; it was asked for frames")
        found = [maps.open(reply.folder, item.place) if maps and item.place else None for item in reply.groups]
        if sum(member.tokens for member in members) < AT_ONCE_TOKENS:
            return list(unpacked(reply, frames, found, ask.shas))
        return await asyncio.to_thread(lambda: list(unpacked(reply, frames, found, ask.shas)))


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


def unpacked(
    reply: Groups, frames: Sequence[memoryview], mapped: Sequence[memoryview | None], shas: Sequence[str]
) -> Iterator[FetchedGroup]:
    """The groups of an answer, checked; ``ProtocolError`` when frames and headers disagree, ``Unreadable`` when what
    came packed is not what its sha256 says, or no group."""
    made = parted(reply.columns, frames, len(reply.groups))
    start = len(reply.columns)
    for item, data, sha, columns in zip(reply.groups, mapped, shas, made, strict=True):
        end = start + len(item.frames)
        named = arrays(item.frames, frames[start:end])
        if item.packed:
            data = next(iter(frames[end : end + 1]), memoryview(b""))
            end += 1
        if data is not None:
            named |= checked(data, sha)
        payload = _payload(named, packed=data is not None)
        payload.add(columns)
        yield FetchedGroup(group=GroupId(item.group), row=item.row, payload=payload)
        start = end


def _payload(named: Mapping[str, Array], *, packed: bool) -> GroupPayload:
    """The group; of what came ``packed`` the shard has not looked at the bytes that its sha256 is of."""
    try:
        return GroupPayload.from_arrays(named)
    except ProtocolError as error:
        if packed:
            raise Unreadable(error.detail) from error
        raise
