"""The payload of a batch's members, straight from their shards, all shards at once.

From a shard on this host only names of places come, and what lies there is mapped; from others, and where the slabs
cannot be opened, the bytes come in frames, as they are stored. Either way they are checked here before anybody sees
them. Where that fails, the shard is asked for bytes that it has checked itself, and so finds out what is damaged.

A shard is asked for as many members at once as its connection carries in a moment, one question behind the other.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from staleflow.clients.slab_reader import MappedSlabs, Unmapped, Unreadable, checked
from staleflow.clients.trainer.data.batch import FetchedGroup
from staleflow.net.adaptive_chunks import AdaptiveChunk, Stuck
from staleflow.net.client import Client
from staleflow.process.host import boot_id
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.columns import split_columns
from staleflow.protocols.wire.messages import GetGroups, Groups, MemberRef
from staleflow.protocols.wire.tensors import Array, arrays
from staleflow.protocols.wire.trajectory import GroupPayload

log = logging.getLogger(__name__)

FETCH_GROUPS = 512
"""Most members of one request; eight frames each stay far below the transport's limit."""
FETCH_BYTES = 40 << 20
"""Most payload of one request."""
LANES = 2
"""Of one shard: what came is unpacked while more is on its way."""

AT_ONCE_BYTES = 1 << 20
"""Fewer than these are checked at once; more in a thread, so that the loop goes on meanwhile."""


class Fetcher:
    """Owned by one stream. ``mapped``: on a shard's host its slabs are mapped."""

    def __init__(self, shards: Sequence[Client], *, mapped: bool = True) -> None:
        self._shards = shards
        self._maps = [MappedSlabs() if mapped else None] * len(shards)
        """One for all shards, but for those whose slabs cannot be opened."""
        self._portions = [AdaptiveChunk(FETCH_BYTES) for _ in shards]
        self._turns = [asyncio.Lock() for _ in shards]

    async def members(self, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        """Every one of them, in that order. ``Refused`` if a shard has not got one, or a corrupt one."""
        waiting: dict[int, deque[MemberRef]] = {}
        for member in members:
            waiting.setdefault(member.shard, deque()).append(member)
        found: dict[GroupId, FetchedGroup] = {}
        lanes = [
            asyncio.create_task(self._lane(shard, waiting[shard], found)) for shard in waiting for _ in range(LANES)
        ]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
        return [found[member.group] for member in members]

    async def _lane(self, shard: int, waiting: deque[MemberRef], found: dict[GroupId, FetchedGroup]) -> None:
        """Fetch until none of the shard's members waits."""
        while waiting:
            part = taken(waiting, self._portions[shard].nbytes)
            try:
                fetched = await self._fetch(shard, part)
            except Stuck:
                waiting.extendleft(reversed(part))
            else:
                found.update((group.group, group) for group in fetched)

    async def _fetch(self, shard: int, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        try:
            return await self._asked(shard, members, self._maps[shard], checks=True)
        except Unmapped as error:
            log.info("shard %d is asked for frames from now on: %s", shard, error)
            self._maps[shard] = None
            return await self._fetch(shard, members)
        except Unreadable as error:
            log.info("shard %d is asked to check what it has: %s", shard, error)
        return await self._asked(shard, members, None, checks=False)

    async def _asked(
        self, shard: int, members: Sequence[MemberRef], maps: MappedSlabs | None, *, checks: bool
    ) -> list[FetchedGroup]:
        ask = GetGroups(
            groups=[member.group for member in members],
            shas=[member.sha for member in members],
            host="" if maps is None else boot_id(),
            checks=checks,
        )
        portion, nbytes = self._portions[shard], sum([member.nbytes for member in members])
        async with self._turns[shard]:
            call = self._shards[shard].call(ask, timeout_s=None)
            reply, frames = await portion.carry(self._shards[shard], call, nbytes, divisible=len(members) > 1)
        if not isinstance(reply, Groups) or [item.group for item in reply.groups] != ask.groups:
            raise ProtocolError(Code.MALFORMED, f"shard {shard} did not answer with the groups it was asked for")
        if maps is None and any(item.place is not None for item in reply.groups):
            raise ProtocolError(Code.MALFORMED, f"shard {shard} answered with places; it was asked for frames")
        found = [maps.open(reply.folder, item.place) if maps and item.place else None for item in reply.groups]
        if nbytes < AT_ONCE_BYTES:
            return list(unpacked(reply, frames, found, ask.shas))
        return await asyncio.to_thread(lambda: list(unpacked(reply, frames, found, ask.shas)))


def taken(waiting: deque[MemberRef], most_bytes: int) -> list[MemberRef]:
    """The first of those that wait, within the sizes of one request; at least one."""
    part = [waiting.popleft()]
    nbytes = part[0].nbytes
    while waiting and len(part) < FETCH_GROUPS and (nbytes := nbytes + waiting[0].nbytes) <= most_bytes:
        part.append(waiting.popleft())
    return part


def unpacked(
    reply: Groups, frames: Sequence[memoryview], mapped: Sequence[memoryview | None], shas: Sequence[str]
) -> Iterator[FetchedGroup]:
    """The groups of an answer, checked; ``ProtocolError`` when frames and headers disagree, ``Unreadable`` when what
    came packed is not what its sha256 says, or no group."""
    made = split_columns(reply.columns, frames, len(reply.groups))
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
