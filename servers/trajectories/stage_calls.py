"""Long polls of stage workers: assignment of groups to them, and recovery when they disappear.

A worker has one call at a time, which lists the tickets that it has.

- The replies of the last ``MAX_REMEMBERED_CALLS`` calls of each worker are kept as tickets. A call that is sent again
  because its reply was lost gets the same groups again.
- A newer call returns tickets that an older one took if the worker neither finished nor lists them: that reply went to
  a duplicate of the call, after a restart for instance, and was never read.
- Among waiting workers, the one with the fewest groups is served first, and the queue is divided among all of them.
- Pauses of this process do not count against any worker.

Payload is sent as it is stored, and the worker checks it. A worker that finds damage calls again and requests payload
that the shard has checked.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence

from staleflow.configs.section import MAX_GROUPS
from staleflow.net.endpoint import Call
from staleflow.net.errors import Refused
from staleflow.process.host import boot_id
from staleflow.process.pauses import Pauses
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import GetStageWork, PutStageResults, StageItem, StageWork
from staleflow.protocols.wire.tensors import Array, specs_and_frames
from staleflow.servers.runner import Tasks
from staleflow.servers.trajectories.holdings import StoredGroup, place_of
from staleflow.servers.trajectories.prompts import Prompts, Row
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.stage_queue import Ticket
from staleflow.servers.trajectories.stage_times import StageTimes
from staleflow.servers.trajectories.store import CorruptRecord, unpack_verified

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
MAX_WAIT_MS = 60_000
"""Maximum time that a call waits; after that it gets an empty reply."""
MAX_REMEMBERED_CALLS = 16
"""Maximum number of calls per worker whose reply can be repeated."""
MAX_REMEMBERED_WORKERS = 1024
"""Maximum number of workers whose calls are remembered, lost ones included."""
MAX_BYTES = 64 << 20
"""Maximum bytes of frames in one reply, its first group excepted."""


class StageCalls:
    """Waiting calls of all stages.

    ``seconds_a_group`` is the time limit per group of each stage. ``times`` logs when workers had groups.
    """

    def __init__(
        self,
        shard: Shard,
        tasks: Tasks,
        *,
        prompts: Prompts,
        seconds_a_group: Mapping[str, float],
        calls_a_group: Mapping[str, int],
        times: StageTimes | None,
    ) -> None:
        """``calls_a_group``: number of calls of user code per group of each stage."""
        self._shard = shard
        self._tasks = tasks
        self._prompts = prompts
        self._seconds_a_group = seconds_a_group
        self._calls_a_group = calls_a_group
        self._times = times
        self._waiting: dict[str, dict[Call, float]] = {stage: {} for stage in shard.queues}
        """Waiting calls of each stage with their arrival times."""
        self._replies: dict[str, dict[int, list[Ticket]]] = {}
        self._closed = False
        self._paused_s = 0.0
        """Total of all pauses of this process so far."""
        self._logged_holds: set[tuple[str, str]] = set()
        """Stage and worker of every hold that has been logged."""
        shard.on_queued = self._serve_soon
        shard.now_s = self._now_s
        self._scheduled: set[str] = set()

    def take(self, call: Call, body: GetStageWork) -> None:
        """Reply with queued groups, or keep the call until there are some, for at most ``wait_ms``."""
        if body.stage not in self._waiting:
            raise ProtocolError(Code.MALFORMED, f"unknown stage: {body.stage!r}")
        if body.max_groups < 1 or body.wait_ms < 0:
            raise ProtocolError(
                Code.MALFORMED,
                f"max_groups is {body.max_groups} and wait_ms is {body.wait_ms}; at least 1 and 0 are required",
            )
        if len(body.held) > MAX_GROUPS:
            raise ProtocolError(Code.OVERSIZE, f"{len(body.held)} groups listed as held; at most {MAX_GROUPS}")
        replies = self._replies.get(body.worker, {})
        if (tickets := replies.get(call.id)) is not None:
            queue = self._shard.queues[body.stage]
            self._answer(call, body, [ticket for ticket in tickets if queue.holds(ticket)])
            return
        newest = max((*replies, *self._waits(body.worker)), default=0)
        if call.id < newest:  # a late duplicate: its worker has sent newer calls
            call.reply(StageWork(items=[]))
            return
        self._shard.queues[body.stage].ask(body.worker, body.calls)
        self._give_back(body)
        waiting, loop = self._waiting[body.stage], asyncio.get_running_loop()
        for older in [
            older for older in waiting if _is_from(older, body.worker)
        ]:  # its reply would not be read any more
            self._end(body.stage, older)
        waiting[call] = loop.time()
        self._serve(body.stage)
        if not call.done:
            wait_s = min(body.wait_ms, MAX_WAIT_MS) / 1000
            loop.call_later(wait_s, self._end, body.stage, call)

    def _waits(self, worker: str) -> list[int]:
        """Return the ids of the waiting calls of a worker."""
        return [call.id for waiting in self._waiting.values() for call in waiting if _is_from(call, worker)]

    def _give_back(self, body: GetStageWork) -> None:
        """Return tickets to the queue that the worker neither lists nor finished: their reply was lost."""
        queue, listed = self._shard.queues[body.stage], set(body.held)
        for tickets in self._replies.get(body.worker, {}).values():
            queue.give_back(ticket for ticket in tickets if ticket.number not in listed)

    def finished(self, body: PutStageResults) -> None:
        """Note that a worker has returned these tickets, whatever their results."""
        if self._times is not None:
            tickets = [result.ticket for result in body.results]
            self._times.finished(body.stage, body.worker, tickets, asyncio.get_running_loop().time())

    def lose(self, worker: str) -> None:
        """Requeue the groups of a lost worker.

        The worker may come back, preceded by a duplicate of the call that took those groups. The number of that call
        stays remembered with an empty reply, so that the duplicate takes nothing.
        """
        if replies := self._replies.pop(worker, None):
            self._replies[worker] = {max(replies): []}
            while len(self._replies) > MAX_REMEMBERED_WORKERS:
                del self._replies[next(iter(self._replies))]
        for stage, queue in self._shard.queues.items():
            self._shard.give_up(queue.lose(worker), f"{stage}: its workers vanished")
            self._serve_soon(stage)

    async def watch(self) -> None:
        """Requeue groups whose tickets expired and serve workers whose hold has ended, until cancelled.

        A pause of this process (SIGSTOP, a suspended virtual machine, a slow sync) is credited first: the results that
        workers sent in the meantime are still unread in the socket.
        """
        loop, pauses = asyncio.get_running_loop(), Pauses(WATCH_INTERVAL_S)
        while True:
            self._paused_s += pauses.tick(loop.time())
            for stage, queue in self._shard.queues.items():
                self._shard.give_up(queue.expire(self._now_s()), f"{stage}: its workers exceeded the time limit")
                self._log_holds(stage)
                self._serve(stage)
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _now_s(self) -> float:
        """Return the loop's time without the pauses of this process."""
        return asyncio.get_running_loop().time() - self._paused_s

    def _log_holds(self, stage: str) -> None:
        """Log the start and the end of each hold once."""
        failing = {one.worker: one for one in self._shard.queues[stage].failing()}
        for pair in [pair for pair in self._logged_holds if pair[0] == stage and pair[1] not in failing]:
            self._logged_holds.remove(pair)
            log.info("stage worker %s recovered: it serves stage %s again", pair[1], stage)
        for worker, one in failing.items():
            if (stage, worker) not in self._logged_holds:
                self._logged_holds.add((stage, worker))
                log.error(
                    "stage worker %s held after failing %d groups of stage %s in a row, the groups are retried: %s",
                    worker,
                    one.failures,
                    stage,
                    one.why,
                )

    def close(self) -> None:
        """Stop handing out groups; end the waiting calls with empty replies."""
        self._closed = True
        for stage, calls in self._waiting.items():
            for call in list(calls):
                self._end(stage, call)

    def _end(self, stage: str, call: Call) -> None:
        came_s = self._waiting[stage].pop(call, None)
        if came_s is not None and not call.done and isinstance(call.body, GetStageWork):
            self._remember(call.body.worker, call.id, [])
            call.reply(StageWork(items=[], waited_ms=_ms_since(came_s)))

    def _remember(self, worker: str, id: int, tickets: list[Ticket]) -> None:
        replies = self._replies.setdefault(worker, {})
        replies[id] = tickets
        while len(replies) > MAX_REMEMBERED_CALLS:
            del replies[min(replies)]

    def _serve_soon(self, stage: str) -> None:
        """Serve at the end of this loop iteration, so that a worker gets several of the groups queued in it."""
        if stage not in self._scheduled:
            self._scheduled.add(stage)
            asyncio.get_running_loop().call_soon(self._serve, stage)

    def _serve(self, stage: str) -> None:
        self._scheduled.discard(stage)
        queue, waiting = self._shard.queues[stage], self._waiting[stage]
        left, now_s, a_group = len(waiting), self._now_s(), self._calls_a_group[stage]
        for call in sorted(waiting, key=_num_held):
            if not queue or self._closed:
                return
            came_s, body = waiting[call], call.body
            if call.done or not isinstance(body, GetStageWork):
                del waiting[call]
                continue
            most, left = min(body.max_groups, math.ceil(len(queue) / left)), left - 1
            at_once, seconds = max(1, body.calls // a_group), self._seconds_a_group[stage]
            tickets = queue.take(body.worker, most, now_s=now_s, seconds_each=seconds, at_once=at_once)
            if not tickets:  # the worker is held, or has failed every waiting group
                continue
            del waiting[call]
            self._remember(body.worker, call.id, tickets)
            if self._times is not None:
                self._times.started(stage, tickets, asyncio.get_running_loop().time())
            self._answer(call, body, tickets, waited_ms=_ms_since(came_s))

    def _answer(self, call: Call, body: GetStageWork, tickets: Sequence[Ticket], *, waited_ms: int = 0) -> None:
        """Reply with the groups of these tickets, once their rows are in memory."""
        if self._prompts.has(groups := [ticket.key.group for ticket in tickets]):
            self._reply(call, body, tickets, {group: self._prompts.row(group) for group in groups}, waited_ms)
        else:
            self._tasks.start(self._answer_later(call, body, tickets, waited_ms))

    async def _answer_later(self, call: Call, body: GetStageWork, tickets: Sequence[Ticket], waited_ms: int) -> None:
        try:
            rows = await self._prompts.fetch([ticket.key.group for ticket in tickets])
        except Refused:  # the run is over
            rows = {}
        if not call.done:
            self._reply(call, body, tickets, rows, waited_ms)

    def _reply(
        self,
        call: Call,
        body: GetStageWork,
        tickets: Sequence[Ticket],
        rows: Mapping[GroupId, Row | None],
        waited_ms: int,
    ) -> None:
        """Reply with the groups of these tickets that are still here and have a row: without one, a group is over."""
        items: list[StageItem] = []
        frames: list[memoryview] = []
        slabs = self._shard.slabs
        maps = slabs is not None and body.host == boot_id()
        left = min(body.most_bytes, MAX_BYTES)
        for index, ticket in enumerate(tickets):
            stored, row = self._shard.holdings.find(ticket.key), rows.get(ticket.key.group)
            if stored is None or row is None:
                continue
            try:
                place = place_of(stored) if maps else None
                specs, more = specs_and_frames(self._needed(stored, body.stage))
                if place is None:
                    more.append(self._packed(stored, reader_checks=body.checks))
            except CorruptRecord as corrupt:
                self._tasks.start(self._shard.quarantine(corrupt))
                continue
            left -= sum(frame.nbytes for frame in more)
            if items and left < 0:
                self._shard.queues[body.stage].give_back(tickets[index:])
                break
            frames += more
            group, lease = ticket.key
            items.append(
                StageItem(
                    group=group,
                    lease=lease,
                    ticket=ticket.number,
                    row=row,
                    frames=specs,
                    sha=stored.record.sha,
                    place=place,
                )
            )
        folder = slabs.folder if maps and slabs is not None else ""
        call.reply(StageWork(items=items, folder=folder, waited_ms=waited_ms), frames)

    def _packed(self, stored: StoredGroup, *, reader_checks: bool) -> memoryview:
        """Return the packed payload, verified here unless the reader checks it. Raise ``CorruptRecord``."""
        if reader_checks:
            return self._shard.view_payload(stored)
        blob = self._shard.read_payload(stored)
        unpack_verified(stored.key, stored.record, blob)
        return memoryview(blob)

    def _needed(self, stored: StoredGroup, stage: str) -> dict[str, Array]:
        """Return the columns of other stages that this stage needs."""
        wanted = self._shard.stages[stage].needs
        columns = self._shard.read_columns([stored])[0] if wanted else {}
        return {name: columns[name] for name in wanted}


def _is_from(call: Call, worker: str) -> bool:
    """Return True if the call is open and from this worker."""
    return not call.done and isinstance(call.body, GetStageWork) and call.body.worker == worker


def _ms_since(came_s: float) -> int:
    return round((asyncio.get_running_loop().time() - came_s) * 1000)


def _num_held(call: Call) -> int:
    """Return the number of groups that the caller has already."""
    return len(call.body.held) if isinstance(call.body, GetStageWork) else 0
