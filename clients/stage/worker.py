"""A stage worker: takes groups from the trajectory servers, has its stage make their columns, hands the columns back.

Consumes: ``StageWork`` of each shard, as soon as it has some. Produces: one ``StageResult`` a group, the columns of the
stage or the reason why there are none. A worker that dies owes nothing: the shard gives its groups to another one,
and the ticket fences what it may still say.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.mapped import MappedSlabs, Unreadable, checked
from staleflow.clients.out_of_memory import out_of_memory
from staleflow.protocols.consistency.ids import GroupId, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import FinishStage, Results, StageItem, StageResult, StageWork, TakeStage
from staleflow.protocols.wire.tensors import arrays, specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.runtime.client import Client
from staleflow.runtime.host import boot_id
from staleflow.runtime.seldom import Seldom

log = logging.getLogger(__name__)

TAKE_WAIT_MS = 2000
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

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[Made]:
        """The columns of each group, in order. An exception ends the worker; its groups go to another one."""
        ...

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        """The columns of these groups are durable; nobody waits for them any more."""
        ...


@dataclass(slots=True)
class Worked:
    """What a worker did so far."""

    groups: int = 0
    failed: int = 0


class StageWorker:
    """Serves one stage at every shard; the stage is shared, so shards wait for each other only inside it."""

    def __init__(self, *, worker: WorkerId, name: str, stage: Stage, max_groups: int) -> None:
        self._worker = worker
        self._name = name
        self._stage = stage
        self._max_groups = max_groups
        self._said = Seldom()
        self.worked = Worked()

    async def serve(self, shards: Sequence[Client]) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for shard in shards:
                tasks.create_task(self._serve_shard(shard))

    async def _serve_shard(self, shard: Client) -> None:
        maps, host = MappedSlabs(), boot_id()
        loop = asyncio.get_running_loop()
        while True:
            asked = loop.time()
            take = TakeStage(
                stage=self._name, worker=self._worker, max_groups=self._max_groups, wait_ms=TAKE_WAIT_MS, host=host
            )
            work, frames = await shard.call(take, timeout_s=None)
            if isinstance(work, StageWork) and work.items:
                try:
                    groups = _groups(work, frames, maps)
                except Unreadable as error:  # who asks again gets the same groups
                    log.info("shard %s is asked for frames from now on: %s", shard.address, error)
                    host = ""
                    continue
                await self._work(shard, work.items, groups)
            elif loop.time() - asked < AT_ONCE_S:  # a shard that drains has nothing and does not wait either
                await asyncio.sleep(AT_ONCE_S)

    async def _work(self, shard: Client, items: Sequence[StageItem], groups: Sequence["StageGroup | Failed"]) -> None:
        """Make the columns of the groups and hand them back together."""
        found = [group for group in groups if isinstance(group, StageGroup)]
        made = dict(zip([group.group for group in found], await self._make(found), strict=True))
        made |= {item.group: group for item, group in zip(items, groups, strict=True) if isinstance(group, Failed)}
        results: list[StageResult] = []
        out: list[memoryview] = []
        for item in items:
            result, more = self._result(item, made[item.group])
            results.append(result)
            out += more
        finish = FinishStage(stage=self._name, worker=self._worker, results=results)
        answer = await shard.ask(finish, Results, out, timeout_s=None)
        good = self._count(finish, answer)
        await self._stage.accepted([group for group in found if group.group in good])

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

    def _count(self, finish: FinishStage, answer: Results) -> set[GroupId]:
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


def _groups(work: StageWork, frames: Sequence[memoryview], maps: MappedSlabs) -> list[StageGroup | Failed]:
    """Each group, or why it is none. ``Unreadable`` if one lies where this process cannot read it.

    What is mapped is copied: a stage that is given up on may still be at work when the slab is written anew.
    """
    start, groups = 0, list[StageGroup | Failed]()
    for item in work.items:
        end = start + len(item.frames)
        try:
            named = arrays(item.frames, frames[start:end])
            if item.place is not None:
                named |= checked(memoryview(bytes(maps.open(work.folder, item.place))), item.sha)
            payload = GroupPayload.from_arrays(named)
            groups.append(StageGroup(group=item.group, row=item.row, payload=payload))
        except ProtocolError as error:
            groups.append(Failed(str(error)))
        start = end
    return groups
