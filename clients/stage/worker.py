"""A stage worker: takes groups from the trajectory servers, computes their columns, returns the columns.

Consumes: ``StageWork`` of each shard as soon as it has groups, while others are in progress; at most as much at once as
the connection carries in a moment, or one group. Produces: one ``StageResult`` per group as soon as it is computed: the
columns, or the reason why there are none.

A worker that dies needs no recovery: the shard assigns its groups to another worker, and the ticket fences its late
results.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.out_of_memory import out_of_memory
from staleflow.clients.slab_reader import MappedSlabs, Unmapped, Unreadable, checked
from staleflow.net.adaptive_chunks import AdaptiveChunk, Stuck
from staleflow.net.client import Client
from staleflow.process.host import boot_id
from staleflow.process.rate_limited_log import RateLimitedLog
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import (
    GetStageWork,
    PutStageResults,
    Result,
    Results,
    StageItem,
    StageResult,
    StageWork,
)
from staleflow.protocols.wire.tensors import arrays, specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload

log = logging.getLogger(__name__)

TAKE_WAIT_MS = 2000
TAKE_BYTES = 64 << 20
"""Maximum payload of one reply."""
MIN_POLL_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageGroup:
    """One group as a stage receives it; ``payload.stages`` has the columns of earlier stages."""

    group: GroupId
    row: dict[str, Any]
    payload: GroupPayload


@dataclass(frozen=True, slots=True)
class Failed:
    """The stage has failed a group for good, so the group is released. ``why`` is one sentence."""

    why: str


StageOutcome = dict[str, NDArray[np.float32]] | Failed
"""Columns of one group, by their short names, or the failure."""


class Stage(Protocol):
    """The computation of a stage."""

    together: ClassVar[bool]
    """True: the stage processes all groups of a call at once. False: the worker calls it with each group
    concurrently."""

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        """Return the columns of each group, in order. An exception ends the worker; its groups go to another one."""
        ...

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        """Note that the columns of these groups are durable. The run does not wait for this call."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Finished:
    """Result of one group; ``group`` is None if its payload could not be read."""

    item: StageItem
    group: StageGroup | None
    result: StageOutcome


class _InFlight:
    """Groups of one shard that the worker has: taken, computed, returned, in this order.

    At most ``places`` of them; more are taken when ``least`` places are free.
    """

    def __init__(self, *, places: int, least: int) -> None:
        self._places = places
        self._least = least
        self._tickets: dict[int, None] = {}
        self._results: list[_Finished] = []
        self._ready, self._freed = asyncio.Event(), asyncio.Event()

    def tickets(self) -> list[int]:
        """Return the tickets of all groups that have not been returned yet."""
        return list(self._tickets)

    async def room(self) -> int:
        """Wait for enough free places; return their number."""
        while (free := self._places - len(self._tickets)) < self._least:
            self._freed.clear()
            await self._freed.wait()
        return free

    def add(self, items: Sequence[StageItem]) -> None:
        """Add groups that were received."""
        self._tickets |= dict.fromkeys(item.ticket for item in items)

    def finish(self, finished: Sequence[_Finished]) -> None:
        """Queue results to be returned."""
        self._results += finished
        self._ready.set()

    async def finished(self) -> list[_Finished]:
        """Wait for results; return and clear the queue."""
        await self._ready.wait()
        self._ready.clear()
        finished, self._results = self._results, []
        return finished

    def remove(self, finished: Sequence[_Finished]) -> None:
        """Free the places of results that the shard has accepted or rejected."""
        for one in finished:
            self._tickets.pop(one.item.ticket, None)
        self._freed.set()


@dataclass(slots=True)
class WorkCounts:
    """Counts of a worker."""

    groups: int = 0
    failed: int = 0


class StageWorker:
    """Serve one stage at every shard. The stage is shared, so shards wait for each other only inside it.

    The worker has at most ``max_groups`` of each shard and ``calls`` concurrent calls of user code. If the stage
    processes groups one by one, each returned group is replaced immediately: a slow group blocks only its own place.
    """

    def __init__(
        self,
        *,
        worker: WorkerId,
        name: str,
        stage: Stage,
        max_groups: int,
        calls: int = 0,
        on_result: Callable[[GroupId, Result], None] = lambda group, result: None,
    ) -> None:
        """``on_result``: called with the shard's verdict on each returned group, in the order of their return."""
        self._on_result = on_result
        self._worker = worker
        self._name = name
        self._stage = stage
        self._max_groups = max_groups
        self._calls = calls
        self._log_limit = RateLimitedLog()
        self.worked = WorkCounts()

    async def serve(self, shards: Sequence[Client]) -> None:
        """Work until cancelled."""
        maps = MappedSlabs()
        async with asyncio.TaskGroup() as tasks:
            for shard in shards:
                in_flight = _InFlight(places=self._max_groups, least=self._max_groups if self._stage.together else 1)
                tasks.create_task(self._take(shard, in_flight, tasks, maps))
                tasks.create_task(self._return_results(shard, in_flight))

    async def _take(self, shard: Client, in_flight: "_InFlight", tasks: asyncio.TaskGroup, maps: MappedSlabs) -> None:
        """Take groups as places become free, and start their computation.

        After a reply that cannot be read, the worker calls again and receives the same groups.
        """
        host, checks, chunk = boot_id(), True, AdaptiveChunk(TAKE_BYTES)
        loop = asyncio.get_running_loop()
        while True:
            room, asked = await in_flight.room(), loop.time()
            take = GetStageWork(
                stage=self._name,
                worker=self._worker,
                max_groups=room,
                wait_ms=TAKE_WAIT_MS,
                host=host if checks else "",
                held=in_flight.tickets(),
                checks=checks,
                most_bytes=chunk.nbytes,
                calls=self._calls,
            )
            try:
                work, frames = await _request_work(shard, take, chunk)
                groups = _groups(work, frames, maps, checks=checks)
            except Stuck:
                continue
            except Unmapped as error:
                log.info("cannot map slabs of shard %s, requesting frames instead: %s", shard.address, error)
                host = ""
                continue
            except Unreadable as error:
                log.info("damaged payload from shard %s, requesting checked payload: %s", shard.address, error)
                checks = False
                continue
            if groups:
                checks = True
                in_flight.add(work.items)
                items = list(zip(work.items, groups, strict=True))
                for part in [items] if self._stage.together else [[one] for one in items]:
                    tasks.create_task(self._work(part, in_flight))
            elif (
                loop.time() - asked < MIN_POLL_INTERVAL_S
            ):  # a draining shard replies at once with nothing: do not spin
                await asyncio.sleep(MIN_POLL_INTERVAL_S)

    async def _work(self, items: Sequence[tuple[StageItem, "StageGroup | Failed"]], in_flight: "_InFlight") -> None:
        """Compute the columns of these groups."""
        readable = [group for _, group in items if isinstance(group, StageGroup)]
        results = iter(await self._make(readable) if readable else ())
        in_flight.finish(
            [
                _Finished(item, group, next(results)) if isinstance(group, StageGroup) else _Finished(item, None, group)
                for item, group in items
            ]
        )

    async def _return_results(self, shard: Client, in_flight: "_InFlight") -> None:
        """Return results, together with those computed in the meantime."""
        while True:
            finished = await in_flight.finished()
            results: list[StageResult] = []
            out: list[memoryview] = []
            for one in finished:
                result, more = self._result(one.item, one.result)
                results.append(result)
                out += more
            finish = PutStageResults(stage=self._name, worker=self._worker, results=results)
            answer = await shard.ask(finish, Results, out, timeout_s=None)
            good = self._count(finish, answer)
            groups = [one.group for one in finished if one.group is not None]
            await self._stage.accepted([group for group in groups if group.group in good])
            in_flight.remove(finished)

    async def _make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        """Call the stage; log the groups in progress if it raises, which ends the worker."""
        try:
            return await self._stage.make(groups)
        except Exception as error:
            named = ", ".join(str(group.group) for group in groups)
            advice = "; lower trainer.micro_tokens" if out_of_memory(error) else ""
            log.error("stage %s failed on groups %s, they go to another worker: %r%s", self._name, named, error, advice)
            raise

    def _result(self, item: StageItem, outcome: StageOutcome) -> tuple[StageResult, list[memoryview]]:
        error, columns = (outcome.why, {}) if isinstance(outcome, Failed) else ("", outcome)
        if error and (more := self._log_limit.due()) is not None:
            log.error("group %d has no %s: %s%s", item.group, self._name, error, more)
        specs, frames = specs_and_frames(columns)
        result = StageResult(group=item.group, lease=item.lease, ticket=item.ticket, frames=specs, error=error)
        return result, frames

    def _count(self, finish: PutStageResults, answer: Results) -> set[GroupId]:
        """Count the results; return the groups whose columns the shard has stored."""
        good: set[GroupId] = set()
        for result, outcome in zip(finish.results, answer.results, strict=True):
            self.worked.groups += 1
            self.worked.failed += bool(result.error)
            self._on_result(result.group, outcome)
            if outcome.code is not None:
                log.info("group %d: %s %s", result.group, outcome.code, outcome.detail)
            elif not result.error:
                good.add(result.group)
        return good


async def _request_work(shard: Client, take: GetStageWork, chunk: AdaptiveChunk) -> tuple[StageWork, list[memoryview]]:
    """Request groups and adapt the chunk to the time of the transfer. Raise ``Stuck``."""
    clock = asyncio.get_running_loop().time
    began, call = clock(), shard.call(take, timeout_s=None)
    work, frames = await chunk.watch(shard, call, take.most_bytes, divisible=take.max_groups > 1)
    if not isinstance(work, StageWork):
        raise ProtocolError(Code.MALFORMED, f"{shard.address} replied to GetStageWork with {type(work).__name__}")
    if frames:  # an empty reply would only measure the pauses of this loop
        chunk.took(sum(frame.nbytes for frame in frames), clock() - began - work.waited_ms / 1000)
    return work, frames


def _groups(
    work: StageWork, frames: Sequence[memoryview], maps: MappedSlabs, *, checks: bool
) -> list[StageGroup | Failed]:
    """Read each group. With ``checks`` off, an unreadable group becomes ``Failed``: the shard has checked it. Raise
    ``Unmapped``, ``Unreadable``.

    Mapped payload is copied: an abandoned stage may still be reading it when the slab is reused.
    """
    start, groups = 0, list[StageGroup | Failed]()
    for item in work.items:
        packed = start + len(item.frames)
        end = packed + (item.place is None)
        try:
            if item.place is not None:
                data = memoryview(bytes(maps.open(work.folder, item.place)))
            else:
                data = next(iter(frames[packed:end]), memoryview(b""))
            named = checked(data, item.sha) | arrays(item.frames, frames[start:packed])
            payload = GroupPayload.from_arrays(named)
            groups.append(StageGroup(group=item.group, row=item.row, payload=payload))
        except (ProtocolError, Unreadable) as error:
            if checks:
                raise Unreadable(str(error)) from error
            groups.append(Failed(str(error)))
        start = end
    return groups
