"""Finished groups on their way to one shard.

Consumes payloads from the groups' tasks; produces one verdict for each. While one message waits for its answer the next
ones gather, so the engine never waits for a push, and a slow shard gets fewer, larger messages; none larger than its
connection carries in a moment, unless one group is. Where the shard is on the same host a message only names where the
payload has been written. A shard that had no room for a group is sent no payload before it has said that there is some.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from staleflow.clients.rollout.groups import truncated
from staleflow.clients.rollout.slab_writer import SlabWriter
from staleflow.net.adaptive_chunks import AdaptiveChunk, Stuck
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Assign, Place, PushGroups, PushItem, Result, Results
from staleflow.protocols.wire.tensors import Array, pieces, specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload

MAX_GROUPS = 64
MAX_BYTES = 32 << 20
BUSY_S = 0.5
"""A group that the shard did not take is not offered again sooner; others are."""


@dataclass(slots=True, eq=False)
class Finished:
    assign: Assign
    named: dict[str, Array]
    truncated: bool
    place: Place | None = None
    """Where it is written; None: it is sent in frames, or has not been written yet."""
    in_frames: bool = False
    """It has to be sent in frames."""
    due_s: float = 0.0
    """It is not offered sooner."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.named.values())

    @property
    def frame_bytes(self) -> int:
        """Of what is sent."""
        return self.nbytes if self.place is None else 0

    def item(self, worker: WorkerId) -> tuple[PushItem, list[memoryview]]:
        """What is said of it, and its frames."""
        specs, frames = ([], []) if self.place is not None else specs_and_frames(self.named)
        group, lease = self.assign.group, self.assign.lease
        item = PushItem(
            group=group, lease=lease, worker=worker, truncated=self.truncated, frames=specs, place=self.place
        )
        return item, frames


class Pusher:
    """One shard's queue. ``settled`` is called once for each group, with what became of it; not for a dropped one."""

    def __init__(
        self,
        shard: Client,
        worker: WorkerId,
        settled: Callable[[Assign, Result], None],
        slabs: SlabWriter | None = None,
    ) -> None:
        """``slabs``: of that shard; without them everything is sent in frames."""
        self._shard = shard
        self._slabs = slabs
        self._worker = worker
        self._settled = settled
        self._portion = AdaptiveChunk(MAX_BYTES)
        self._queue: list[Finished] = []
        self._filled = asyncio.Event()
        self.idle = asyncio.Event()
        """Set while nothing waits and nothing is under way."""
        self.idle.set()

    def put(self, assign: Assign, group: GroupPayload) -> None:
        self._queue.append(Finished(assign, group.to_arrays(), truncated(group)))
        self._filled.set()
        self.idle.clear()

    def drop(self, assign: Assign) -> bool:
        """Forget a group that has not been sent; False when it is too late."""
        for place, finished in enumerate(self._queue):
            if finished.assign.lease == assign.lease:
                del self._queue[place]
                self._over(finished)
                return True
        return False

    async def run(self) -> None:
        """Push for ever."""
        most = MAX_GROUPS
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._queue:
                if not (batch := self._take(most)):
                    await self._until_due()
                    continue
                await self._write(batch)
                sent = fitting([finished.frame_bytes for finished in batch], self._portion.nbytes)
                batch, self._queue = batch[:sent], batch[sent:] + self._queue
                try:
                    busy = await self._push(batch)
                except Stuck:
                    self._queue = batch + self._queue
                    continue
                if busy:
                    self._put_off(busy, behind=most == 1)
                    await self._room()
                most = 1 if busy else MAX_GROUPS  # room for one group is not yet room for all
            self.idle.set()

    def _take(self, most: int) -> list[Finished]:
        """As many as fit into one message, at least one; none when no group may be offered now."""
        now_s = asyncio.get_running_loop().time()
        batch = [finished for finished in self._queue if finished.due_s <= now_s][:most]
        batch = batch[: fitting([finished.nbytes for finished in batch], MAX_BYTES)]
        self._queue = [finished for finished in self._queue if finished not in batch]
        return batch

    def _put_off(self, busy: list[Finished], *, behind: bool) -> None:
        """``behind``: others are offered before them, which may find room."""
        due_s = asyncio.get_running_loop().time() + BUSY_S
        for finished in busy:
            finished.due_s = due_s
        self._queue = self._queue + busy if behind else busy + self._queue

    async def _until_due(self) -> None:
        """Wait until a group may be offered, or another one comes."""
        self._filled.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(finished.due_s for finished in self._queue)):
                await self._filled.wait()

    async def _room(self) -> None:
        """Returns once the shard has room. Meanwhile every group waits here, where ``drop`` finds it."""
        with suppress(Refused):  # who pushes is refused, too
            await self._shard.ask(PushGroups(items=[]), Results, timeout_s=None)

    async def _write(self, batch: list[Finished]) -> None:
        """Put what is to be pushed where the shard finds it, as far as there is room."""
        for finished in batch:
            if self._slabs is not None and finished.place is None and not finished.in_frames:
                finished.place = await self._slabs.write(pieces(finished.named))

    def _over(self, finished: Finished) -> None:
        """Nobody will look for it in its slab on account of this push."""
        if finished.place is not None and self._slabs is not None:
            self._slabs.settled(finished.place)
            finished.place = None

    def _send_in_frames(self, batch: list[Finished]) -> None:
        """The shard has begun anew and knows nothing of these slabs."""
        if self._slabs is not None:
            self._slabs.abandon()
        for finished in batch:
            self._over(finished)
            finished.in_frames = True

    async def _push(self, batch: list[Finished]) -> list[Finished]:
        """Send; those that the shard is too busy for come back."""
        items = [finished.item(self._worker) for finished in batch]
        message = PushGroups(items=[item for item, _ in items])
        frames = [frame for _, more in items for frame in more]
        try:
            pushing = self._shard.ask(message, Results, frames, timeout_s=None)
            nbytes = sum(finished.frame_bytes for finished in batch)
            results = (await self._portion.carry(self._shard, pushing, nbytes, divisible=len(batch) > 1)).results
        except Refused as no:
            if no.code is Code.STALE and any(finished.place is not None for finished in batch):
                self._send_in_frames(batch)
                return await self._push(batch)
            results = [Result(code=no.code, detail=no.detail)] * len(batch)
        busy: list[Finished] = []
        for finished, result in zip(batch, results, strict=True):
            if result.code is Code.BUSY:
                busy.append(finished)
            else:
                self._over(finished)
                self._settled(finished.assign, result)
        return busy


def fitting(sizes: Sequence[int], most: int) -> int:
    """How many of the first fit together, at least one."""
    taken, total = 0, 0
    for size in sizes:
        total += size
        if taken and total > most:
            break
        taken += 1
    return taken
