"""Finished groups on their way to one shard.

Consumes payloads from the groups' tasks; produces one verdict for each. While one message waits for its answer the next
ones gather, so the engine never waits for a push, and a slow shard gets fewer, larger messages.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from staleflow.clients.rollout.groups import truncated
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Assign, PushGroups, PushItem, Result, Results
from staleflow.protocols.wire.tensors import specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.runtime.client import Client
from staleflow.runtime.errors import Refused

MOST_GROUPS = 64
MOST_BYTES = 32 << 20
BUSY_S = 0.2
"""A group that the shard has no room for is offered again after this."""


@dataclass(frozen=True, slots=True)
class Finished:
    assign: Assign
    item: PushItem
    frames: list[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(frame.nbytes for frame in self.frames)


class Pusher:
    """One shard's queue. ``settled`` is called once for each group, with what became of it; not for a dropped one."""

    def __init__(self, shard: Client, worker: WorkerId, settled: Callable[[Assign, Result], None]) -> None:
        self._shard = shard
        self._worker = worker
        self._settled = settled
        self._queue: list[Finished] = []
        self._filled = asyncio.Event()
        self.idle = asyncio.Event()
        """Set while nothing waits and nothing is under way."""
        self.idle.set()

    def put(self, assign: Assign, group: GroupPayload) -> None:
        specs, frames = specs_and_frames(group.to_arrays())
        item = PushItem(
            group=assign.group, lease=assign.lease, worker=self._worker, truncated=truncated(group), frames=specs
        )
        self._queue.append(Finished(assign, item, frames))
        self._filled.set()
        self.idle.clear()

    def drop(self, assign: Assign) -> bool:
        """Forget a group that has not been sent; False when it is too late."""
        for place, finished in enumerate(self._queue):
            if finished.assign.lease == assign.lease:
                del self._queue[place]
                return True
        return False

    async def run(self) -> None:
        """Push for ever."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._queue:
                if busy := await self._push(self._take()):
                    self._queue += busy
                    await asyncio.sleep(BUSY_S)
            self.idle.set()

    def _take(self) -> list[Finished]:
        """As many as fit into one message, at least one."""
        taken, nbytes = 0, 0
        for finished in self._queue[:MOST_GROUPS]:
            nbytes += finished.nbytes
            if taken and nbytes > MOST_BYTES:
                break
            taken += 1
        batch, self._queue = self._queue[:taken], self._queue[taken:]
        return batch

    async def _push(self, batch: list[Finished]) -> list[Finished]:
        """Send; those that the shard is too busy for come back."""
        message = PushGroups(items=[finished.item for finished in batch])
        frames = [frame for finished in batch for frame in finished.frames]
        try:
            results = (await self._shard.ask(message, Results, frames, timeout_s=None)).results
        except Refused as no:
            results = [Result(code=no.code, detail=no.detail)] * len(batch)
        busy: list[Finished] = []
        for finished, result in zip(batch, results, strict=True):
            if result.code is Code.BUSY:
                busy.append(finished)
            else:
                self._settled(finished.assign, result)
        return busy
