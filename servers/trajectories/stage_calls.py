"""Stage workers at the shard: who waits for groups, what they get, and what happens when they vanish.

A worker asks once at a time, and says which tickets it has. A call that is sent again because its answer was lost gets
the same groups again: the answers of the last ``REMEMBERED`` calls of each worker are kept as tickets. A newer call
gives back what an older one took, nobody finished and the worker does not name: that was an echo, after a restart say,
and its answer went to nobody. Of those that wait, who has the fewest groups is served first; what is queued is shared
out over all that wait. Pauses of this process count against no worker.

Payload is sent as it is stored, and its worker checks it. One that has found damage asks once more, for what the shard
has checked.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from staleflow.configs.section import MAX_GROUPS
from staleflow.net.endpoint import Call
from staleflow.process.host import boot_id
from staleflow.process.pauses import Pauses
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import GetStageWork, PutStageResults, StageItem, StageWork
from staleflow.protocols.wire.tensors import Array, specs_and_frames
from staleflow.servers.runner import Tasks
from staleflow.servers.trajectories.holdings import Held, place_of
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.stage_queue import Ticket
from staleflow.servers.trajectories.stage_times import StageTimes
from staleflow.servers.trajectories.store import CorruptRecord, unpacked

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
LONGEST_WAIT_MS = 60_000
"""A worker that waits longer is answered with nothing."""
REMEMBERED = 16
"""Calls of one worker whose answer can be given again."""
REMEMBERED_WORKERS = 1024
"""Workers whose calls are remembered, those that are gone included."""
MAX_BYTES = 64 << 20
"""Of the frames of one answer, but for its first group."""


class StageCalls:
    """The calls of all stages. ``seconds_a_group`` bounds, by stage, how long a worker may take for each group;
    ``times`` keeps when they had them."""

    def __init__(
        self,
        shard: Shard,
        tasks: Tasks,
        *,
        row: Callable[[GroupId], dict[str, Any]],
        seconds_a_group: Mapping[str, float],
        calls_a_group: Mapping[str, int],
        times: StageTimes | None,
    ) -> None:
        """``calls_a_group``: calls of user code that one group of a stage takes."""
        self._shard = shard
        self._tasks = tasks
        self._row = row
        self._seconds_a_group = seconds_a_group
        self._calls_a_group = calls_a_group
        self._times = times
        self._waiting: dict[str, dict[Call, float]] = {stage: {} for stage in shard.queues}
        """Calls of each stage that wait, with the time at which they came."""
        self._given: dict[str, dict[int, list[Ticket]]] = {}
        self._closed = False
        self._paused_s = 0.0
        """All pauses of this process so far."""
        self._held: set[tuple[str, str]] = set()
        """Stage and worker of the holds that are logged."""
        shard.on_queued = self._serve_soon
        shard.now_s = self._now_s
        self._scheduled: set[str] = set()

    def take(self, call: Call, body: GetStageWork) -> None:
        """Answer with what there is, or keep the call until there is something, at most ``wait_ms``."""
        if body.stage not in self._waiting:
            raise ProtocolError(Code.MALFORMED, f"there is no stage {body.stage!r}")
        if body.max_groups < 1 or body.wait_ms < 0:
            raise ProtocolError(Code.MALFORMED, f"max_groups {body.max_groups}, wait_ms {body.wait_ms}")
        if len(body.held) > MAX_GROUPS:
            raise ProtocolError(Code.OVERSIZE, f"{len(body.held)} groups are held; at most {MAX_GROUPS}")
        given = self._given.get(body.worker, {})
        if (tickets := given.get(call.id)) is not None:
            queue = self._shard.queues[body.stage]
            self._answer(call, body, [ticket for ticket in tickets if queue.holds(ticket)])
            return
        if call.id < max((*given, *self._waits(body.worker)), default=0):  # an echo: its worker has long gone on
            call.reply(StageWork(items=[]))
            return
        self._shard.queues[body.stage].ask(body.worker, body.calls)
        self._give_back(body)
        waiting, loop = self._waiting[body.stage], asyncio.get_running_loop()
        for older in [older for older in waiting if _of(older, body.worker)]:  # nobody reads its answer any more
            self._end(body.stage, older)
        waiting[call] = loop.time()
        self._serve(body.stage)
        if not call.done:
            wait_s = min(body.wait_ms, LONGEST_WAIT_MS) / 1000
            loop.call_later(wait_s, self._end, body.stage, call)

    def _waits(self, worker: str) -> list[int]:
        """Calls of that worker that wait."""
        return [call.id for waiting in self._waiting.values() for call in waiting if _of(call, worker)]

    def _give_back(self, body: GetStageWork) -> None:
        """What a worker that asks for more neither has nor finished did not reach it: it went to an echo."""
        queue, held = self._shard.queues[body.stage], set(body.held)
        for tickets in self._given.get(body.worker, {}).values():
            queue.give_back(ticket for ticket in tickets if ticket.number not in held)

    def finished(self, body: PutStageResults) -> None:
        """A worker has handed these back, whatever becomes of them."""
        if self._times is not None:
            tickets = [result.ticket for result in body.results]
            self._times.finished(body.stage, body.worker, tickets, asyncio.get_running_loop().time())

    def lose(self, worker: str) -> None:
        """A worker is gone: its groups are queued again.

        It may be back, with an echo of the call that gave it those: that one was answered, and takes nothing.
        """
        if given := self._given.pop(worker, None):
            self._given[worker] = {max(given): []}
            while len(self._given) > REMEMBERED_WORKERS:
                del self._given[next(iter(self._given))]
        for stage, queue in self._shard.queues.items():
            self._shard.give_up(queue.lose(worker), f"{stage}: its workers vanished")
            self._serve_soon(stage)

    async def watch(self) -> None:
        """Queue again what a worker has for too long, and serve those whose hold is over.

        A pause of this process (SIGSTOP, a virtual machine that was suspended, a sync) is credited first: what the
        workers finished in the meantime lies unread in the socket.
        """
        loop, pauses = asyncio.get_running_loop(), Pauses(WATCH_INTERVAL_S)
        while True:
            self._paused_s += pauses.tick(loop.time())
            for stage, queue in self._shard.queues.items():
                self._shard.give_up(queue.expire(self._now_s()), f"{stage}: its workers took too long")
                self._tell_held(stage)
                self._serve(stage)
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _now_s(self) -> float:
        """The loop's time without the pauses of this process."""
        return asyncio.get_running_loop().time() - self._paused_s

    def _tell_held(self, stage: str) -> None:
        """Log each hold once, and its end."""
        failing = {one.worker: one for one in self._shard.queues[stage].failing()}
        for known in [known for known in self._held if known[0] == stage and known[1] not in failing]:
            self._held.remove(known)
            log.info("stage worker %s serves the stage %s again", known[1], stage)
        for worker, one in failing.items():
            if (stage, worker) not in self._held:
                self._held.add((stage, worker))
                told = (
                    "stage worker %s failed %d groups of the stage %s in a row; it is held, the groups are retried: %s"
                )
                log.error(told, worker, one.failures, stage, one.why)

    def close(self) -> None:
        """Hand nothing out any more; who waits is answered with nothing."""
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
        given = self._given.setdefault(worker, {})
        given[id] = tickets
        while len(given) > REMEMBERED:
            del given[min(given)]

    def _serve_soon(self, stage: str) -> None:
        """Serve once all groups of this moment are queued, so that a worker gets several at once."""
        if stage not in self._scheduled:
            self._scheduled.add(stage)
            asyncio.get_running_loop().call_soon(self._serve, stage)

    def _serve(self, stage: str) -> None:
        self._scheduled.discard(stage)
        queue, waiting = self._shard.queues[stage], self._waiting[stage]
        left, now_s, a_group = len(waiting), self._now_s(), self._calls_a_group[stage]
        for call in sorted(waiting, key=_has):
            if not queue or self._closed:
                return
            came_s, body = waiting[call], call.body
            if call.done or not isinstance(body, GetStageWork):
                del waiting[call]
                continue
            most, left = min(body.max_groups, math.ceil(len(queue) / left)), left - 1
            at_once, seconds = max(1, body.calls // a_group), self._seconds_a_group[stage]
            tickets = queue.take(body.worker, most, now_s=now_s, seconds_each=seconds, at_once=at_once)
            if not tickets:  # it is held, or has failed all that wait
                continue
            del waiting[call]
            self._remember(body.worker, call.id, tickets)
            if self._times is not None:
                self._times.given(stage, tickets, asyncio.get_running_loop().time())
            self._answer(call, body, tickets, waited_ms=_ms_since(came_s))

    def _answer(self, call: Call, body: GetStageWork, tickets: Sequence[Ticket], *, waited_ms: int = 0) -> None:
        items: list[StageItem] = []
        frames: list[memoryview] = []
        slabs = self._shard.slabs
        maps = slabs is not None and body.host == boot_id()
        left = min(body.most_bytes, MAX_BYTES)
        for index, ticket in enumerate(tickets):
            held = self._shard.holdings.find(ticket.key)
            if held is None:
                continue
            try:
                place = place_of(held) if maps else None
                specs, more = specs_and_frames(self._needed(held, body.stage))
                if place is None:
                    more.append(self._packed(held, checked=body.checks))
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
                    row=self._row(group),
                    frames=specs,
                    sha=held.record.sha,
                    place=place,
                )
            )
        folder = slabs.folder if maps and slabs is not None else ""
        call.reply(StageWork(items=items, folder=folder, waited_ms=waited_ms), frames)

    def _packed(self, held: Held, *, checked: bool) -> memoryview:
        """The payload; it is looked at here unless it is ``checked`` by who gets it. ``CorruptRecord``."""
        if checked:
            return self._shard.stored(held)
        blob = self._shard.read_payload(held)
        unpacked(held.key, held.record, blob)
        return memoryview(blob)

    def _needed(self, held: Held, stage: str) -> dict[str, Array]:
        """Columns of other stages that this one gets."""
        wanted = self._shard.stages[stage].needs
        made = self._shard.read_columns([held])[0] if wanted else {}
        return {name: made[name] for name in wanted}


def _of(call: Call, worker: str) -> bool:
    """Whether this worker waits for it."""
    return not call.done and isinstance(call.body, GetStageWork) and call.body.worker == worker


def _ms_since(came_s: float) -> int:
    return round((asyncio.get_running_loop().time() - came_s) * 1000)


def _has(call: Call) -> int:
    """Groups that the worker of a call has already."""
    return len(call.body.held) if isinstance(call.body, GetStageWork) else 0
