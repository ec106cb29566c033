"""Push finished groups to one shard.

Consumes payloads from the groups' tasks; produces one verdict for each. While a message waits for its reply, the next
groups gather, so the engine never waits for a push, and a slow shard gets fewer but larger messages. A message is
limited to what its connection transmits in a moment, unless it holds a single group. If the shard is on the same host,
a message only names the place of the payload. A shard that had no room gets no payload before it reports room.
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
BUSY_RETRY_INTERVAL_S = 0.5
"""Minimum time before a group that the shard rejected for lack of room is offered again. Others go ahead."""


@dataclass(slots=True, eq=False)
class FinishedGroup:
    assign: Assign
    named: dict[str, Array]
    truncated: bool
    place: Place | None = None
    """Location of the payload in a slab; None: it is sent in frames, or has not been written yet."""
    in_frames: bool = False
    """The payload must be sent in frames."""
    due_s: float = 0.0
    """Earliest time of the next attempt, in the event loop's clock."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.named.values())

    @property
    def frame_bytes(self) -> int:
        """Return the bytes that the push sends in frames."""
        return self.nbytes if self.place is None else 0

    def item(self, worker: WorkerId) -> tuple[PushItem, list[memoryview]]:
        """Return the push message of the group, and its frames."""
        specs, frames = ([], []) if self.place is not None else specs_and_frames(self.named)
        group, lease = self.assign.group, self.assign.lease
        item = PushItem(
            group=group, lease=lease, worker=worker, truncated=self.truncated, frames=specs, place=self.place
        )
        return item, frames


class Pusher:
    """The queue of one shard. ``settled`` is called once with each group's verdict, except for dropped groups."""

    def __init__(
        self,
        shard: Client,
        worker: WorkerId,
        settled: Callable[[Assign, Result], None],
        slabs: SlabWriter | None = None,
    ) -> None:
        """``slabs``: writer for that shard; without it, everything is sent in frames."""
        self._shard = shard
        self._slabs = slabs
        self._worker = worker
        self._settled = settled
        self._portion = AdaptiveChunk(MAX_BYTES)
        self._queue: list[FinishedGroup] = []
        self._filled = asyncio.Event()
        self.idle = asyncio.Event()
        """Set while no group is queued or being pushed."""
        self.idle.set()

    def put(self, assign: Assign, group: GroupPayload) -> None:
        self._queue.append(FinishedGroup(assign, group.to_arrays(), truncated(group)))
        self._filled.set()
        self.idle.clear()

    def drop(self, assign: Assign) -> bool:
        """Remove a queued group; return False if it is already being pushed."""
        for place, finished in enumerate(self._queue):
            if finished.assign.lease == assign.lease:
                del self._queue[place]
                self._release_place(finished)
                return True
        return False

    async def run(self) -> None:
        """Push groups until cancelled."""
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
                    self._delay(busy, behind=most == 1)
                    await self._wait_for_room()
                most = 1 if busy else MAX_GROUPS  # room for one group does not yet mean room for all
            self.idle.set()

    def _take(self, most: int) -> list[FinishedGroup]:
        """Remove and return the groups that fit into one message, at least one; none if no group is due."""
        now_s = asyncio.get_running_loop().time()
        batch = [finished for finished in self._queue if finished.due_s <= now_s][:most]
        batch = batch[: fitting([finished.nbytes for finished in batch], MAX_BYTES)]
        self._queue = [finished for finished in self._queue if finished not in batch]
        return batch

    def _delay(self, busy: list[FinishedGroup], *, behind: bool) -> None:
        """Queue the groups again with a delay. With ``behind``, others go first, as they may fit into the room left."""
        due_s = asyncio.get_running_loop().time() + BUSY_RETRY_INTERVAL_S
        for finished in busy:
            finished.due_s = due_s
        self._queue = self._queue + busy if behind else busy + self._queue

    async def _until_due(self) -> None:
        """Wait until a group is due or a new one arrives."""
        self._filled.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(finished.due_s for finished in self._queue)):
                await self._filled.wait()

    async def _wait_for_room(self) -> None:
        """Return once the shard has room. All groups stay queued meanwhile, so that ``drop`` can remove them."""
        with suppress(Refused):  # the following push then gets the same rejection and reports it
            await self._shard.ask(PushGroups(items=[]), Results, timeout_s=None)

    async def _write(self, batch: list[FinishedGroup]) -> None:
        """Write payloads into a slab while there is room; the others go in frames."""
        for finished in batch:
            if self._slabs is not None and finished.place is None and not finished.in_frames:
                finished.place = await self._slabs.write(pieces(finished.named))

    def _release_place(self, finished: FinishedGroup) -> None:
        """Release the group's place, as no reply to this push can refer to it any more."""
        if finished.place is not None and self._slabs is not None:
            self._slabs.settled(finished.place)
            finished.place = None

    def _send_in_frames(self, batch: list[FinishedGroup]) -> None:
        """Switch to frames: the shard has restarted and does not know these slabs."""
        if self._slabs is not None:
            self._slabs.abandon()
        for finished in batch:
            self._release_place(finished)
            finished.in_frames = True

    async def _push(self, batch: list[FinishedGroup]) -> list[FinishedGroup]:
        """Send a batch and return the groups that the shard was too busy for."""
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
        busy: list[FinishedGroup] = []
        for finished, result in zip(batch, results, strict=True):
            if result.code is Code.BUSY:
                busy.append(finished)
            else:
                self._release_place(finished)
                self._settled(finished.assign, result)
        return busy


def fitting(sizes: Sequence[int], most: int) -> int:
    """Return how many of the first sizes fit into ``most`` together, at least one."""
    fit, total = 0, 0
    for size in sizes:
        total += size
        if fit and total > most:
            break
        fit += 1
    return fit
