"""A stage worker: takes groups from the trajectory servers, has its stage make their columns, hands the columns back.

Consumes: ``StageWork`` of each shard, as soon as it has some, while others are still at work; no more at once than the
connection carries in a moment, unless one group is. Produces: one ``StageResult`` a group, as soon as it is made: the
columns of the stage or the reason why there are none. A worker that dies owes nothing: the shard gives its groups to
another one, and the ticket fences what it may still say.
"""

import asyncio
import logging
from collections.abc import Sequence
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
from staleflow.protocols.wire.messages import GetStageWork, PutStageResults, Results, StageItem, StageResult, StageWork
from staleflow.protocols.wire.tensors import arrays, specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload

log = logging.getLogger(__name__)

TAKE_WAIT_MS = 2000
TAKE_BYTES = 64 << 20
"""Most payload of one answer."""
AT_ONCE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageGroup:
    """One group as a stage gets it; ``payload.stages`` has the columns of the stages before."""

    group: GroupId
    row: dict[str, Any]
    payload: GroupPayload


@dataclass(frozen=True, slots=True)
class Failed:
    """The stage has nothing for a group, and never will: it is released. One sentence that says why."""

    why: str


Made = dict[str, NDArray[np.float32]] | Failed
"""The columns that a stage made of a group, by their own names."""


class Stage(Protocol):
    """What a worker does to groups."""

    together: ClassVar[bool]
    """Whether it makes all groups of a call in one go; else the worker calls it with each, side by side."""

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[Made]:
        """The columns of each group, in order. An exception ends the worker; its groups go to another one."""
        ...

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        """The columns of these groups are durable; nobody waits for them any more."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    """What was made of one group; ``group`` is None where there was none to make anything of."""

    item: StageItem
    group: StageGroup | None
    made: Made


class _Hand:
    """The groups of one shard that a worker has: taken, made, handed back, in this order. ``places`` of them at most;
    more are taken when ``least`` places are free."""

    def __init__(self, *, places: int, least: int) -> None:
        self._places = places
        self._least = least
        self._tickets: dict[int, None] = {}
        self._made: list[_Done] = []
        self._some, self._freed = asyncio.Event(), asyncio.Event()

    def tickets(self) -> list[int]:
        """Of all that the shard has not got back yet."""
        return list(self._tickets)

    async def room(self) -> int:
        """Free places, once there are enough."""
        while (free := self._places - len(self._tickets)) < self._least:
            self._freed.clear()
            await self._freed.wait()
        return free

    def took(self, items: Sequence[StageItem]) -> None:
        """These are here."""
        self._tickets |= dict.fromkeys(item.ticket for item in items)

    def made(self, done: Sequence[_Done]) -> None:
        """These can go."""
        self._made += done
        self._some.set()

    async def done(self) -> list[_Done]:
        """What can go, once there is something."""
        await self._some.wait()
        self._some.clear()
        done, self._made = self._made, []
        return done

    def gave(self, done: Sequence[_Done]) -> None:
        """The shard has these, or does not want them any more."""
        for one in done:
            self._tickets.pop(one.item.ticket, None)
        self._freed.set()


@dataclass(slots=True)
class Worked:
    """What a worker did so far."""

    groups: int = 0
    failed: int = 0


class StageWorker:
    """Serves one stage at every shard; the stage is shared, so shards wait for each other only inside it.

    It has at most ``max_groups`` of each shard; ``calls`` of user code are under way at most. Where the stage makes its
    groups one by one, the place of each that is handed back is given to a new one: a slow group holds up its own place
    only.
    """

    def __init__(self, *, worker: WorkerId, name: str, stage: Stage, max_groups: int, calls: int = 0) -> None:
        self._worker = worker
        self._name = name
        self._stage = stage
        self._max_groups = max_groups
        self._calls = calls
        self._said = RateLimitedLog()
        self.worked = Worked()

    async def serve(self, shards: Sequence[Client]) -> None:
        """Work until cancelled."""
        maps = MappedSlabs()
        async with asyncio.TaskGroup() as tasks:
            for shard in shards:
                hand = _Hand(places=self._max_groups, least=self._max_groups if self._stage.together else 1)
                tasks.create_task(self._take(shard, hand, tasks, maps))
                tasks.create_task(self._hand_back(shard, hand))

    async def _take(self, shard: Client, hand: "_Hand", tasks: asyncio.TaskGroup, maps: MappedSlabs) -> None:
        """Fill the hand, and begin with what comes. Who could not read it asks again, and is given the same anew."""
        host, checks, portion = boot_id(), True, AdaptiveChunk(TAKE_BYTES)
        loop = asyncio.get_running_loop()
        while True:
            room, asked = await hand.room(), loop.time()
            take = GetStageWork(
                stage=self._name,
                worker=self._worker,
                max_groups=room,
                wait_ms=TAKE_WAIT_MS,
                host=host if checks else "",
                held=hand.tickets(),
                checks=checks,
                most_bytes=portion.nbytes,
                calls=self._calls,
            )
            try:
                work, frames = await _asked(shard, take, portion)
                groups = _groups(work, frames, maps, checks=checks)
            except Stuck:
                continue
            except Unmapped as error:
                log.info("shard %s is asked for frames from now on: %s", shard.address, error)
                host = ""
                continue
            except Unreadable as error:
                log.info("shard %s is asked to check what it has: %s", shard.address, error)
                checks = False
                continue
            if groups:
                checks = True
                hand.took(work.items)
                taken = list(zip(work.items, groups, strict=True))
                for part in [taken] if self._stage.together else [[one] for one in taken]:
                    tasks.create_task(self._work(part, hand))
            elif loop.time() - asked < AT_ONCE_S:  # a shard that drains has nothing and does not wait either
                await asyncio.sleep(AT_ONCE_S)

    async def _work(self, taken: Sequence[tuple[StageItem, "StageGroup | Failed"]], hand: "_Hand") -> None:
        """Make the columns of these groups."""
        found = [group for _, group in taken if isinstance(group, StageGroup)]
        made = iter(await self._make(found) if found else ())
        hand.made(
            [
                _Done(item, group, next(made)) if isinstance(group, StageGroup) else _Done(item, None, group)
                for item, group in taken
            ]
        )

    async def _hand_back(self, shard: Client, hand: "_Hand") -> None:
        """Hand back what is made, together what was made in the meantime."""
        while True:
            done = await hand.done()
            results: list[StageResult] = []
            out: list[memoryview] = []
            for one in done:
                result, more = self._result(one.item, one.made)
                results.append(result)
                out += more
            finish = PutStageResults(stage=self._name, worker=self._worker, results=results)
            answer = await shard.ask(finish, Results, out, timeout_s=None)
            good = self._count(finish, answer)
            groups = [one.group for one in done if one.group is not None]
            await self._stage.accepted([group for group in groups if group.group in good])
            hand.gave(done)

    async def _make(self, groups: Sequence[StageGroup]) -> Sequence[Made]:
        """As the stage's own; what ends the worker is told with the groups that it ends at."""
        try:
            return await self._stage.make(groups)
        except Exception as error:
            named = ", ".join(str(group.group) for group in groups)
            advice = "; lower trainer.micro_tokens" if out_of_memory(error) else ""
            log.error("the %s stage fails at %s, they go to another worker: %r%s", self._name, named, error, advice)
            raise

    def _result(self, item: StageItem, made: Made) -> tuple[StageResult, list[memoryview]]:
        error, columns = (made.why, {}) if isinstance(made, Failed) else ("", made)
        if error and (more := self._said.due()) is not None:
            log.error("group %d has no %s: %s%s", item.group, self._name, error, more)
        specs, frames = specs_and_frames(columns)
        result = StageResult(group=item.group, lease=item.lease, ticket=item.ticket, frames=specs, error=error)
        return result, frames

    def _count(self, finish: PutStageResults, answer: Results) -> set[GroupId]:
        """The groups whose columns the shard has taken."""
        good: set[GroupId] = set()
        for result, outcome in zip(finish.results, answer.results, strict=True):
            self.worked.groups += 1
            self.worked.failed += bool(result.error)
            if outcome.code is not None:
                log.info("group %d: %s %s", result.group, outcome.code, outcome.detail)
            elif not result.error:
                good.add(result.group)
        return good


async def _asked(shard: Client, take: GetStageWork, portion: AdaptiveChunk) -> tuple[StageWork, list[memoryview]]:
    """What the shard has, and learn from how long it was on its way. ``Stuck``."""
    clock = asyncio.get_running_loop().time
    began, call = clock(), shard.call(take, timeout_s=None)
    work, frames = await portion.watch(shard, call, take.most_bytes, divisible=take.max_groups > 1)
    if not isinstance(work, StageWork):
        raise ProtocolError(Code.MALFORMED, f"{shard.address} answered TakeStage with {type(work).__name__}")
    if frames:  # of an answer without any only this loop's own pauses would be learned
        portion.took(sum(frame.nbytes for frame in frames), clock() - began - work.waited_ms / 1000)
    return work, frames


def _groups(
    work: StageWork, frames: Sequence[memoryview], maps: MappedSlabs, *, checks: bool
) -> list[StageGroup | Failed]:
    """Each group; of those that the shard has checked, too, why it is none. ``Unmapped``, ``Unreadable``.

    What is mapped is copied: a stage that is given up on may still be at work when the slab is written anew.
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
