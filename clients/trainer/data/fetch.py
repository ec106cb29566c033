"""Fetch the payload of a batch's members directly from their shards, all shards in parallel.

A shard on this host sends only the places of payloads, which are mapped. Other shards, and those whose slabs cannot be
opened, send the stored bytes in frames. Either way the bytes are verified here before use. If verification fails, the
shard is asked for bytes that it has checked itself, and so detects the damage.

Each request asks for as many members as the shard's connection transmits in a moment; requests follow each other.
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

MAX_REQUEST_GROUPS = 256
"""Maximum members per request. With seven arrays each and two of each typed column, they stay below the transport's
limit of frames."""
MAX_REQUEST_BYTES = 40 << 20
"""Maximum payload bytes per request."""
LANES_PER_SHARD = 2
"""Concurrent requests per shard, so that one reply is unpacked while the next arrives."""

MAX_INLINE_BYTES = 1 << 20
"""Payloads below this size are verified inline, larger ones in a thread, to keep the event loop responsive."""


class Fetcher:
    """Owned by one stream. ``mapped``: map the slabs of shards on this host."""

    def __init__(self, shards: Sequence[Client], *, mapped: bool = True) -> None:
        self._shards = shards
        self._maps = [MappedSlabs() if mapped else None] * len(shards)
        """One object for all shards; None for shards whose slabs cannot be opened."""
        self._portions = [AdaptiveChunk(MAX_REQUEST_BYTES) for _ in shards]
        self._turns = [asyncio.Lock() for _ in shards]

    async def members(self, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        """Return all members in the given order. ``Refused`` if a shard lacks one or has a corrupt one."""
        waiting: dict[int, deque[MemberRef]] = {}
        for member in members:
            waiting.setdefault(member.shard, deque()).append(member)
        fetched_groups: dict[GroupId, FetchedGroup] = {}
        lanes = [
            asyncio.create_task(self._lane(shard, waiting[shard], fetched_groups))
            for shard in waiting
            for _ in range(LANES_PER_SHARD)
        ]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
        return [fetched_groups[member.group] for member in members]

    async def _lane(self, shard: int, waiting: deque[MemberRef], fetched_groups: dict[GroupId, FetchedGroup]) -> None:
        """Fetch until no member of the shard is left."""
        while waiting:
            part = next_request(waiting, self._portions[shard].nbytes)
            try:
                fetched = await self._fetch(shard, part)
            except Stuck:
                waiting.extendleft(reversed(part))
            else:
                fetched_groups.update((group.group, group) for group in fetched)

    async def _fetch(self, shard: int, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        try:
            return await self._request(shard, members, self._maps[shard], checks=True)
        except Unmapped as error:
            log.info("shard %d: requesting frames from now on: %s", shard, error)
            self._maps[shard] = None
            return await self._fetch(shard, members)
        except Unreadable as error:
            log.info("shard %d: requesting a check of its bytes: %s", shard, error)
        return await self._request(shard, members, None, checks=False)

    async def _request(
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
            raise ProtocolError(Code.MALFORMED, f"shard {shard} did not reply with the requested groups")
        if maps is None and any(item.place is not None for item in reply.groups):
            raise ProtocolError(Code.MALFORMED, f"shard {shard} replied with places; frames were requested")
        payloads = [maps.open(reply.folder, item.place) if maps and item.place else None for item in reply.groups]
        if nbytes < MAX_INLINE_BYTES:
            return list(unpacked(reply, frames, payloads, ask.shas))
        return await asyncio.to_thread(lambda: list(unpacked(reply, frames, payloads, ask.shas)))


def next_request(waiting: deque[MemberRef], most_bytes: int) -> list[MemberRef]:
    """Remove and return the first queued members that fit one request; at least one."""
    part = [waiting.popleft()]
    nbytes = part[0].nbytes
    while waiting and len(part) < MAX_REQUEST_GROUPS and (nbytes := nbytes + waiting[0].nbytes) <= most_bytes:
        part.append(waiting.popleft())
    return part


def unpacked(
    reply: Groups, frames: Sequence[memoryview], mapped: Sequence[memoryview | None], shas: Sequence[str]
) -> Iterator[FetchedGroup]:
    """Yield the groups of a reply after verification.

    ``ProtocolError`` if frames and headers disagree; ``Unreadable`` if a packed group does not match its digest or is
    not a group.
    """
    stage_columns = split_columns(reply.columns, frames, len(reply.groups))
    start = len(reply.columns)
    for item, data, sha, columns in zip(reply.groups, mapped, shas, stage_columns, strict=True):
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
    """Decode a group. The shard has not checked ``packed`` bytes, so an error there is ``Unreadable``."""
    try:
        return GroupPayload.from_arrays(named)
    except ProtocolError as error:
        if packed:
            raise Unreadable(error.detail) from error
        raise
