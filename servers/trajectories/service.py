"""The trajectory server: answers the calls of workers, stages and trainers from one shard.

- Pushes and stage results of one drain of the socket are one commit. A push is answered once it is durable *and*
  registered; a stage result once it is durable.
- Stage workers wait here for groups; trainers fetch here what the scheduler has sealed.
- Whoever waits for the scheduler is a task. Payload is hashed by its reader; where the shard is to check what is
  fetched, in a thread.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from staleflow.configs.loading.prompt_rows import PromptRows
from staleflow.net.client import Client
from staleflow.net.endpoint import Call
from staleflow.net.errors import Refused
from staleflow.process.host import boot_id
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.columns import join_columns
from staleflow.protocols.wire.messages import (
    Done,
    GetGroups,
    GetModelLimits,
    GetRetained,
    GetRows,
    GetSlab,
    GetStageWork,
    GetStatus,
    GroupFrames,
    Groups,
    ModelLimits,
    PartialFrames,
    PushGroups,
    PutPartial,
    PutStageResults,
    Result,
    Results,
    Retained,
    Rows,
    Slab,
    StageResult,
    Status,
)
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.tensors import Array, arrays, specs_and_frames
from staleflow.protocols.wire.trajectory import made_columns
from staleflow.servers.runner import Tasks
from staleflow.servers.trajectories.describing import describe
from staleflow.servers.trajectories.holdings import Held, Phase, place_of
from staleflow.servers.trajectories.partials import Partials
from staleflow.servers.trajectories.push_rejects import PushRejects
from staleflow.servers.trajectories.records import Key, Pushed, pushed
from staleflow.servers.trajectories.registrar import Registrar, Then
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.stage_calls import StageCalls
from staleflow.servers.trajectories.stage_reports import report_stages
from staleflow.servers.trajectories.stock import take_stock
from staleflow.servers.trajectories.store import Columns, CorruptRecord, unpacked
from staleflow.store.disk_errors import trouble

log = logging.getLogger(__name__)

BUSY_MS = 500
"""A client asks again after this long when there is no room."""
RETRY_INTERVAL_S = 2.0
"""Where a push found no room although the map has some, a worker may try again so often: nothing else tells that a disk
has room."""
FETCH_AT_ONCE = 32
"""Groups that are read and checked before the loop has its turn again."""
MAX_ROW_BYTES = 64 << 20
"""Of the rows and samples of one answer, and of either of its first group."""
MAX_ROWS = 16_384
"""Groups of one question: its answer has their prompts, however few bytes it is."""
RETAIN_INTERVAL_S = 2.0
RETAIN_SHARE = 1 / 64
"""Of the map: so much may be pushed before it is asked again what may go."""
RETAIN_GROUPS = 4096
"""Groups of one question to the scheduler."""

_NO_MODEL = "the limits of the model are not known yet: no trainer has joined"


class Answers:
    """One result for each item of a call; the reply leaves when all are there."""

    def __init__(self, call: Call, count: int, *, apart: bool = False) -> None:
        """``apart``: a ``busy`` is the answer to its item. Otherwise one makes the whole call busy: asked again, the
        others answer the same."""
        self._call = call
        self._apart = apart
        self._results: list[Result | None] = [None] * count
        self._missing = count
        if not count:
            call.reply(Results(results=[]))

    def put(self, index: int, result: Result) -> None:
        """The result of one item."""
        self._results[index] = result
        self._missing -= 1
        if self._missing or self._call.done:
            return
        results = [result for result in self._results if result is not None]
        busy = next((result for result in results if result.code is Code.BUSY), None)
        if busy is not None and not self._apart:
            self._call.refuse(Code.BUSY, busy.detail, retry_after_ms=BUSY_MS)
        else:
            self._call.reply(Results(results=results))


class TrajectoryService:
    """Answers every call of one trajectory server; lives on one loop."""

    def __init__(
        self,
        shard: Shard,
        stage_calls: StageCalls,
        prompts: PromptRows,
        registrar: Registrar,
        scheduler: Client,
        tasks: Tasks,
        *,
        group_size: int,
        samples_started: int,
        limits: PayloadLimits,
        describes: bool,
    ) -> None:
        """``samples_started``: of a group that moves. ``limits``: of the configuration; those of the model come from
        the scheduler. ``describes``: the scheduler wants to know what prompts are like."""
        self._shard = shard
        self._stage_calls = stage_calls
        self._prompts = prompts
        self._registrar = registrar
        self._scheduler = scheduler
        self._tasks = tasks
        self._group_size = group_size
        self._samples_started = samples_started
        self._limits = limits
        self._model: ModelLimits | None = None
        """None until a trainer has joined: no worker can have written anything before."""
        self._rejects = PushRejects(registrar)
        self._describes = describes
        self._draining = False
        self._look = asyncio.Event()
        """What may go is asked at once."""
        self._missed = asyncio.Event()
        """What is not here is looked for at once."""
        self._full = False
        self._tried_s: float | None = None
        """When a worker was let try last, or was first told not to; None: the last push found room."""
        self._pushed_bytes = 0
        """Since that was asked the last time."""
        self._partials = Partials()

    def on_call(self, call: Call) -> None:
        """Answer now, or with the commit of this drain, or later."""
        try:
            self._dispatch(call)
        except Refused as no:
            call.refuse(no.code, no.detail, retry_after_ms=BUSY_MS if no.code is Code.BUSY else 0)
        except ProtocolError as error:
            call.refuse(error.code, error.detail)

    def on_drained(self) -> None:
        """Everything of this drain is here: commit it."""
        self._shard.commit()

    def on_gone(self, peer: str) -> None:
        """Nothing is heard of a worker any more: its groups go to others."""
        self._stage_calls.lose(peer)
        if self._shard.slabs is not None:
            self._shard.slabs.lose(WorkerId(peer))

    def drain(self) -> None:
        """Take no more work in and hand none out."""
        self._draining = True
        self._stage_calls.close()
        self._tasks.start(self._registrar.idle())

    def _dispatch(self, call: Call) -> None:
        match call.body:
            case PushGroups() as body:
                self._push(call, body)
            case GetSlab() as body:
                self._slab(call, body)
            case GetStageWork() as body:
                self._stage_calls.take(call, body)
            case PutStageResults() as body:
                self._finish(call, body)
            case GetGroups() as body:
                self._tasks.start(self._fetch(call, body))
            case GetRows() as body:
                self._rows(call, body)
            case PutPartial() as body:
                if self._model is None:
                    raise Refused(Code.BUSY, _NO_MODEL)
                limits, started = self._limits, self._samples_started
                self._partials.put(Key(body.group, body.lease), body.partial, call.frames, limits, started)
                call.reply(Done())
            case GetStatus():
                call.reply(
                    Status(values={**self._shard.status(), "rows": len(self._prompts), "partials": len(self._partials)})
                )
            case _:
                call.refuse(Code.DENIED, f"a trajectory server does not answer {type(call.body).__name__}")

    def row(self, group: GroupId) -> dict[str, Any]:
        """The prompt row of a group."""
        if group < 0:
            raise ProtocolError(Code.MALFORMED, f"{group} is no group")
        return self._prompts[group % len(self._prompts)]

    def _rows(self, call: Call, body: GetRows) -> None:
        """Prompt rows, and what other instances wrote of the groups, of as many as fit. Samples that never do are begun
        anew; a row that does not is refused."""
        if len(body.groups) > MAX_ROWS:
            raise ProtocolError(Code.OVERSIZE, f"{len(body.groups)} groups are asked for; at most {MAX_ROWS} at once")
        if body.partials and len(body.partials) != len(body.groups):
            raise ProtocolError(Code.MALFORMED, f"{len(body.groups)} groups come with {len(body.partials)} leases")
        rows: list[dict[str, Any]] = []
        partials: list[PartialFrames | None] = []
        frames: list[bytes] = []
        left = min(body.most_bytes, MAX_ROW_BYTES)
        for group, lease in zip(body.groups, body.partials or [LeaseId(0)] * len(body.groups), strict=True):
            row, found = self.row(group), self._partials.find(Key(group, lease))
            if found is not None and found.nbytes > MAX_ROW_BYTES:
                found = None
            row_bytes = len(msgspec.msgpack.encode(row))
            left -= row_bytes + (0 if found is None else found.nbytes)
            if rows and left < 0:
                break
            if row_bytes > MAX_ROW_BYTES:
                raise ProtocolError(Code.OVERSIZE, f"the row of group {group} has {row_bytes} bytes")
            rows.append(row)
            partials.append(None if found is None else found.header)
            frames += () if found is None else found.frames
        call.reply(Rows(rows=rows, partials=partials), frames)

    # Pushes and stage results ----------------------------------------------------------------------------------------

    def _push(self, call: Call, body: PushGroups) -> None:
        """A full shard looks at no payload: each group is ``busy``. Only the question without any is asked again by the
        client itself, until there is room."""
        if self._draining:
            raise Refused(Code.BUSY, "the trajectory server is draining")
        if why := self._no_room(asked=not body.items):
            if not body.items:
                raise Refused(Code.BUSY, why)
            call.reply(Results(results=[Result(code=Code.BUSY, detail=why)] * len(body.items)))
            return
        parts = _split([len(item.frames) for item in body.items], call.frames)
        slabs = self._shard.slabs
        written = None if slabs is None else slabs.written
        size = self._group_size
        taken: list[Pushed | Result] = []
        for item, frames in zip(body.items, parts, strict=True):
            try:
                taken.append(pushed(item, frames, size, written, self._limits))
            except ProtocolError as error:  # of this group alone: the others of the message may be fine
                taken.append(Result(code=error.code, detail=error.detail))
                self._rejects.note(item, error.code)
        self._pushed_bytes += sum(one.record.nbytes for one in taken if isinstance(one, Pushed))
        if self._pushed_bytes > self._shard.map_bytes * RETAIN_SHARE:
            self._look.set()
        answers = Answers(call, len(taken), apart=True)
        for index, one in enumerate(taken):
            if isinstance(one, Result):
                answers.put(index, one)
                continue
            self._shard.push(one, partial(answers.put, index))
            self._partials.forget(*one.key)

    def _no_room(self, *, asked: bool) -> str:
        """Why pushes are refused; empty when they are not. ``asked``: nobody has sent payload yet."""
        if self._model is None:
            return _NO_MODEL
        if not self._shard.room():
            self._full = True
            self._look.set()
            return "the trajectory server's map is nearly full"
        if not asked:
            return ""
        if not (what := self._shard.full()):
            self._tried_s = None
            return ""
        now_s = asyncio.get_running_loop().time()
        if self._tried_s is None:
            self._tried_s = now_s
        if now_s < self._tried_s + RETRY_INTERVAL_S:
            return f"the trajectory server's {trouble(what)}"
        self._tried_s = now_s
        return ""

    def _slab(self, call: Call, body: GetSlab) -> None:
        slabs = self._shard.slabs
        if slabs is None:
            call.reply(Slab(folder="", name="", nbytes=0, known=[]))
        elif self._draining:
            raise Refused(Code.BUSY, "the trajectory server is draining")
        else:
            call.reply(slabs.give(body, self._shard.slab_room()))

    def _finish(self, call: Call, body: PutStageResults) -> None:
        if body.stage not in self._shard.queues:
            raise ProtocolError(Code.MALFORMED, f"there is no stage {body.stage!r}")
        parts = _split([len(result.frames) for result in body.results], call.frames)
        self._stage_calls.finished(body)
        answers = Answers(call, len(body.results))
        for index, (result, frames) in enumerate(zip(body.results, parts, strict=True)):
            self._finish_one(body, result, frames, partial(answers.put, index))

    def _finish_one(self, body: PutStageResults, result: StageResult, frames: list[memoryview], then: Then) -> None:
        key, stage, worker = Key(result.group, result.lease), body.stage, body.worker
        if result.error:
            then(self._shard.fail(key, stage, result.ticket, worker, result.error))
            return
        held = self._shard.holdings.find(key)
        tokens = 0 if held is None else held.record.tokens
        try:
            named = arrays(result.frames, frames)
            makes = self._shard.stages[stage].makes
            columns = made_columns(stage, named, makes=makes, samples=self._group_size, tokens=tokens)
        except ProtocolError as error:
            failed = self._shard.fail(key, stage, result.ticket, worker, error.detail)
            then(failed if failed.code is not None else Result(code=error.code, detail=error.detail))
            return
        self._shard.finish(Columns(key, stage, columns), result.ticket, worker, then)

    # Fetching --------------------------------------------------------------------------------------------------------

    async def _fetch(self, call: Call, body: GetGroups) -> None:
        try:
            await self._give(call, body)
        except Refused as no:
            call.refuse(no.code, no.detail, retry_after_ms=BUSY_MS if no.code is Code.BUSY else 0)

    async def _give(self, call: Call, body: GetGroups) -> None:
        if len(body.groups) > MAX_ROWS or len(set(body.groups)) < len(body.groups):
            raise Refused(Code.OVERSIZE, f"{len(body.groups)} groups; at most {MAX_ROWS} at once, each of them once")
        if len(body.groups) != len(body.shas):
            raise Refused(Code.MALFORMED, f"{len(body.groups)} groups come with {len(body.shas)} shas")
        wanted = [await self._wanted(group, sha) for group, sha in zip(body.groups, body.shas, strict=True)]
        maps = body.host == boot_id() and self._shard.slabs is not None
        try:
            answer, frames = self._packed(wanted, maps=maps) if maps or body.checks else await self._looked_at(wanted)
        except CorruptRecord as corrupt:
            await self._shard.quarantine(corrupt)
            raise Refused(Code.STALE, f"{corrupt}; it is quarantined") from corrupt
        call.reply(answer, frames)

    def _packed(self, wanted: Sequence[Held], *, maps: bool) -> tuple[Groups, list[memoryview]]:
        """Every payload as it is stored, for a reader that checks it; ``maps``: only its place, where it has one."""
        columns, frames = join_columns(self._shard.read_columns(wanted))
        groups: list[GroupFrames] = []
        for held in wanted:
            data, place = self._shard.stored(held), place_of(held) if maps else None
            if place is None:
                frames.append(data)
            group = held.key.group
            groups.append(GroupFrames(group=group, row=self.row(group), frames=[], place=place, packed=place is None))
        folder = self._shard.slabs.folder if maps and self._shard.slabs is not None else ""
        return Groups(groups=groups, folder=folder, columns=columns), frames

    async def _looked_at(self, wanted: Sequence[Held]) -> tuple[Groups, list[memoryview]]:
        """All arrays of each, the payload checked in a thread."""
        groups: list[GroupFrames] = []
        frames: list[memoryview] = []
        for start in range(0, len(wanted), FETCH_AT_ONCE):
            some = wanted[start : start + FETCH_AT_ONCE]
            columns = self._shard.read_columns(some)
            blobs = [self._shard.read_payload(held) for held in some]
            payloads = await asyncio.to_thread(_checked, some, blobs)
            for held, payload, made in zip(some, payloads, columns, strict=True):
                specs, more = specs_and_frames(payload | made)
                frames += more
                groups.append(GroupFrames(group=held.key.group, row=self.row(held.key.group), frames=specs))
        return Groups(groups=groups), frames

    async def _wanted(self, group: GroupId, sha: str) -> Held:
        held = self._shard.holdings.find_sha(group, sha)
        if held is not None and self._shard.is_whole(held):
            return held
        # What stages had made of it was lost with a disk, and is made again of what a worker pushed again.
        if held is not None and held.phase is not Phase.SETTLED:
            raise Refused(Code.BUSY, f"group {group} is in its stages once more")
        if await self._shard.missing(group, sha):
            self._missed.set()
        raise Refused(Code.STALE, f"group {group} with sha {sha[:12]} is not here")

    # Housekeeping ----------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Take up what was stored; then tell the scheduler, watch the stages, and forget what nobody needs."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._registrar.run())
            group.create_task(self._follow_model())
            await self._shard.recover()
            group.create_task(self._stage_calls.watch())
            group.create_task(report_stages(self._scheduler, self._shard))
            group.create_task(self._retain())
            group.create_task(self._take_stock())
            if self._describes:
                group.create_task(describe(self._scheduler, self._prompts, self._shard.shard))

    async def _follow_model(self) -> None:
        """Learn the limits of the model from the scheduler, and each change of them."""
        while True:
            question = GetModelLimits(known=self._model)
            try:
                self._model = await self._scheduler.ask(question, ModelLimits, timeout_s=None)
            except Refused:  # the run is over
                return
            self._limits = replace(self._limits, model=self._model)

    async def _take_stock(self) -> None:
        """Give up what is not here: of what the run counts on now, and again when a trainer has missed some of what a
        rollback brought back."""
        while True:
            self._missed.clear()
            await take_stock(self._scheduler, self._shard)
            await self._missed.wait()

    async def _retain(self) -> None:
        """Ask what may go, every ``RETAIN_INTERVAL_S``, after many pushes, and soon after a push that found no room."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RETAIN_INTERVAL_S):
                    await self._look.wait()
            if self._full:
                await asyncio.sleep(BUSY_MS / 1000)
            self._look.clear()
            self._full, self._pushed_bytes = False, 0
            asked = self._shard.retainable()
            for start in range(0, len(asked), RETAIN_GROUPS):
                await self._retain_some(asked[start : start + RETAIN_GROUPS])
            self._shard.commit()

    async def _retain_some(self, asked: Sequence[Key]) -> None:
        groups = list(dict.fromkeys(key.group for key in asked))
        question = GetRetained(shard=self._shard.shard, groups=groups)
        try:
            answer = await self._scheduler.ask(question, Retained, timeout_s=None)
        except Refused:  # the run is over: nothing is deleted any more
            return
        self._shard.retain(asked, set(answer.keep))


def _checked(wanted: Sequence[Held], blobs: Sequence[bytes]) -> list[dict[str, Array]]:
    return [unpacked(held.key, held.record, blob) for held, blob in zip(wanted, blobs, strict=True)]


def _split(counts: Sequence[int], frames: list[memoryview]) -> list[list[memoryview]]:
    """The frames of each item."""
    if sum(counts) != len(frames):
        raise ProtocolError(Code.MALFORMED, f"{sum(counts)} frames are announced, {len(frames)} came")
    parts: list[list[memoryview]] = []
    start = 0
    for count in counts:
        parts.append(frames[start : start + count])
        start += count
    return parts
