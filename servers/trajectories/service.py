"""Serve the calls of workers, stages and trainers from one trajectory shard.

- All pushes and stage results of one socket drain share one commit. A push is acknowledged once it is durable *and*
  registered with the scheduler, a stage result once it is durable.
- Stage workers wait here for groups. Trainers fetch the groups of sealed batches here.
- Every wait for the scheduler is a task, so the loop never blocks on it. Readers hash payload themselves; for a reader
  that does not, a thread of the shard checks it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile

import msgspec

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
)
from staleflow.protocols.wire.payload_digest import shortened
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.tensors import Array, arrays, specs_and_frames
from staleflow.protocols.wire.trajectory import made_columns
from staleflow.servers.runner import Answer, Handled, Service, Tasks
from staleflow.servers.trajectories.holdings import Phase, StoredGroup, place_of
from staleflow.servers.trajectories.partials import Partials
from staleflow.servers.trajectories.prompt_features import describe
from staleflow.servers.trajectories.prompts import Prompts, Row
from staleflow.servers.trajectories.records import Key, Pushed, parse_push
from staleflow.servers.trajectories.registrar import PushRejects, Registrar, Then
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.stage_calls import StageCalls
from staleflow.servers.trajectories.stage_reports import report_stages
from staleflow.servers.trajectories.stock import take_stock
from staleflow.servers.trajectories.store import Columns, CorruptRecord, unpack_verified
from staleflow.store.disk_errors import trouble

BUSY_MS = 500
"""Retry delay in milliseconds sent with a ``BUSY`` reply."""
RETRY_INTERVAL_S = 2.0
"""Interval of trial pushes while the disk is full although the map has room. Only a write shows that a disk has room
again."""
FETCH_AT_ONCE = 32
"""Groups read and checked before the event loop runs other tasks."""
MAX_ROW_BYTES = 64 << 20
"""Maximum number of bytes of rows and partial samples in one reply, and of either for its first group."""
MAX_ROWS = 16_384
"""Maximum number of groups in one request. The reply carries their prompts, whose size the request does not bound."""
RETAIN_INTERVAL_S = 2.0
RETAIN_SHARE = 1 / 64
"""Share of the map that may be pushed before the shard requests the next retention decision."""
RETAIN_GROUPS = 4096
"""Maximum number of groups in one retention request to the scheduler."""

_OVER: Row = {"prompt": ""}
"""Stands for the row of a group that is over. Its lease is over as well, so that nothing of it can be pushed."""
_NO_MODEL = "no trainer has joined yet, so the limits of the model are unknown; retry later"


class PendingResults:
    """Collect one result per item of a call and reply once all of them have arrived."""

    def __init__(self, call: Call, count: int, *, apart: bool = False) -> None:
        """Reply immediately to a call without items.

        ``apart``: return ``BUSY`` for its item only. Otherwise one ``BUSY`` rejects the whole call; the retry returns
        the same results for the other items, because every operation is idempotent.
        """
        self._call = call
        self._apart = apart
        self._results: list[Result | None] = [None] * count
        self._missing = count
        if not count:
            call.reply(Results(results=[]))

    def put(self, index: int, result: Result) -> None:
        """Record the result of item ``index``; reply if it was the last one."""
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


class TrajectoryService(Service):
    """One trajectory server without its socket."""

    def __init__(
        self,
        shard: Shard,
        stage_calls: StageCalls,
        prompts: Prompts,
        registrar: Registrar,
        scheduler: Client,
        tasks: Tasks,
        *,
        group_size: int,
        samples_started: int,
        limits: PayloadLimits,
        describes: bool,
    ) -> None:
        """Wire the parts together; no IO here.

        ``samples_started``: samples of a group that migrates. ``limits``: payload limits of the configuration; the
        scheduler adds those of the model. ``describes``: send prompt features to the scheduler.
        """
        super().__init__(tasks, retry_ms=BUSY_MS)
        self._shard = shard
        self._stage_calls = stage_calls
        self._prompts = prompts
        self._registrar = registrar
        self._scheduler = scheduler
        self._group_size = group_size
        self._samples_started = samples_started
        self._limits = limits
        self._model: ModelLimits | None = None
        """None until a trainer has joined: no worker can have generated anything before that."""
        self._rejects = PushRejects(registrar)
        self._describes = describes
        self._draining = False
        self._retain_now = asyncio.Event()
        """Set to request a retention decision immediately."""
        self._check_stock_now = asyncio.Event()
        """Set to compare the shard with the ledger immediately."""
        self._full = False
        self._last_trial_s: float | None = None
        """Time of the last trial push, or of the first rejection; None: the last push found room."""
        self._pushed_bytes = 0
        """Bytes pushed since the last retention request."""
        self._partials = Partials()

    def handle(self, call: Call) -> Handled:
        match call.body:
            case PushGroups() as ask:
                self._push(call, ask)
            case GetSlab() as ask:
                return self._slab(call, ask)
            case GetStageWork() as ask:
                self._stage_calls.take(call, ask)
            case PutStageResults() as ask:
                self._finish(call, ask)
            case GetGroups() as ask:
                return partial(self._fetch, call, ask)
            case GetRows() as ask:
                return self._rows(ask)
            case PutPartial() as ask:
                return self._put_partial(call, ask)
            case GetStatus():
                return self._shard.status(rows=self._prompts.num_rows, partials=len(self._partials))
            case _:
                raise Refused(Code.DENIED, f"a trajectory server does not serve {type(call.body).__name__}")
        return None

    def on_drained(self) -> None:
        """Commit everything that this drain of the socket received."""
        self._shard.commit()

    def on_gone(self, peer: str) -> None:
        """Requeue the groups of a lost worker and retire its slabs."""
        self._stage_calls.lose(peer)
        if self._shard.slabs is not None:
            self._shard.slabs.lose(WorkerId(peer))

    def drain(self) -> None:
        """Accept no new work and hand none out; operations under way are still registered."""
        self._draining = True
        self._stage_calls.close()
        self._tasks.start(self._registrar.idle())

    def _put_partial(self, call: Call, body: PutPartial) -> Done:
        if self._model is None:
            raise Refused(Code.BUSY, _NO_MODEL)
        key = Key(body.group, body.lease)
        self._partials.put(key, body.partial, call.frames, self._limits, self._samples_started, call.peer)
        return Done()

    def _rows(self, body: GetRows) -> Handled:
        """Reply with prompt rows at once if they are in memory. Raise ``ProtocolError`` for a malformed request."""
        if len(body.groups) > MAX_ROWS:
            raise ProtocolError(Code.OVERSIZE, f"{len(body.groups)} groups requested; at most {MAX_ROWS} at once")
        if body.partials and len(body.partials) != len(body.groups):
            raise ProtocolError(
                Code.MALFORMED, f"{len(body.groups)} groups with {len(body.partials)} leases; the numbers must match"
            )
        if invalid := [group for group in body.groups if group < 0]:
            raise ProtocolError(Code.MALFORMED, f"invalid group number: {invalid[0]}; it must not be negative")
        if self._prompts.has(body.groups):
            return self._rows_of(body, body.groups, self._prompts.row)
        return partial(self._fetched_rows, body)

    async def _fetched_rows(self, body: GetRows) -> Answer:
        fetched = await self._prompts.fetch(body.groups, min(body.most_bytes, MAX_ROW_BYTES))
        groups = list(takewhile(fetched.__contains__, body.groups))
        return self._rows_of(body, groups, lambda group: fetched[group] or _OVER)

    def _rows_of(self, body: GetRows, groups: Sequence[GroupId], row_of: Callable[[GroupId], Row]) -> Answer:
        """Reply with the prompt rows and migrated partial samples of as many groups as fit.

        Partial samples that exceed ``MAX_ROW_BYTES`` are left out, so the worker starts their group from the prompt. A
        row that exceeds it is rejected with ``OVERSIZE``.
        """
        rows: list[Row] = []
        partials: list[PartialFrames | None] = []
        frames: list[bytes] = []
        left = min(body.most_bytes, MAX_ROW_BYTES)
        for group, lease in zip(groups, body.partials or [LeaseId(0)] * len(groups), strict=False):
            row, samples = row_of(group), self._partials.find(Key(group, lease))
            if samples is not None and samples.nbytes > MAX_ROW_BYTES:
                samples = None
            row_bytes = len(msgspec.msgpack.encode(row))
            left -= row_bytes + (0 if samples is None else samples.nbytes)
            if rows and left < 0:
                break
            if row_bytes > MAX_ROW_BYTES:
                raise ProtocolError(Code.OVERSIZE, f"the row of group {group} has {row_bytes} bytes")
            rows.append(row)
            partials.append(None if samples is None else samples.header)
            frames += () if samples is None else samples.frames
        return Rows(rows=rows, partials=partials), frames

    # Pushes and stage results ----------------------------------------------------------------------------------------

    def _push(self, call: Call, body: PushGroups) -> None:
        """Parse, check and buffer pushed groups for the next commit.

        A full shard reads no payload and returns ``BUSY`` for each group. A push without items only tests for room: it
        is rejected as a whole, so that the client retries it until there is room.
        """
        if self._draining:
            raise Refused(Code.BUSY, "the trajectory server is stopping")
        if why := self._no_room(probe=not body.items):
            if not body.items:
                raise Refused(Code.BUSY, why)
            call.reply(Results(results=[Result(code=Code.BUSY, detail=why)] * len(body.items)))
            return
        parts = _split([len(item.frames) for item in body.items], call.frames)
        slabs = self._shard.slabs
        read_slab = None if slabs is None else slabs.written_bytes
        size = self._group_size
        parsed: list[Pushed | Result] = []
        for item, frames in zip(body.items, parts, strict=True):
            try:
                parsed.append(parse_push(item, frames, size, read_slab, self._limits))
            except ProtocolError as error:  # rejects this group only: the others in the message may be valid
                parsed.append(Result(code=error.code, detail=error.detail))
                self._rejects.note(item, error.code)
        self._pushed_bytes += sum(one.record.nbytes for one in parsed if isinstance(one, Pushed))
        if self._pushed_bytes > self._shard.map_bytes * RETAIN_SHARE:
            self._retain_now.set()
        pending = PendingResults(call, len(parsed), apart=True)
        for index, one in enumerate(parsed):
            if isinstance(one, Result):
                pending.put(index, one)
                continue
            self._shard.push(one, partial(pending.put, index))
            self._partials.forget(*one.key)

    def _no_room(self, *, probe: bool) -> str:
        """Return why pushes are rejected; empty if they are accepted. ``probe``: the call carries no payload yet."""
        if self._model is None:
            return _NO_MODEL
        if not self._shard.room():
            self._full = True
            self._retain_now.set()
            return "the trajectory server's map is nearly full"
        if not probe:
            return ""
        if not (resource := self._shard.full()):
            self._last_trial_s = None
            return ""
        now_s = asyncio.get_running_loop().time()
        if self._last_trial_s is None:
            self._last_trial_s = now_s
        if now_s < self._last_trial_s + RETRY_INTERVAL_S:
            return f"the trajectory server's {trouble(resource)}"
        self._last_trial_s = now_s
        return ""

    def _slab(self, _: Call, body: GetSlab) -> Slab:
        slabs = self._shard.slabs
        if slabs is None:
            return Slab(folder="", name="", nbytes=0, known=[])
        if self._draining:
            raise Refused(Code.BUSY, "the trajectory server is stopping")
        return slabs.give(body, self._shard.slab_room())

    def _finish(self, call: Call, body: PutStageResults) -> None:
        if body.stage not in self._shard.queues:
            raise ProtocolError(Code.MALFORMED, f"unknown stage: {body.stage!r}")
        parts = _split([len(result.frames) for result in body.results], call.frames)
        self._stage_calls.finished(body)
        pending = PendingResults(call, len(body.results))
        for index, (result, frames) in enumerate(zip(body.results, parts, strict=True)):
            self._finish_one(body, result, frames, partial(pending.put, index))

    def _finish_one(self, body: PutStageResults, result: StageResult, frames: list[memoryview], then: Then) -> None:
        key, stage, worker = Key(result.group, result.lease), body.stage, body.worker
        if result.error:
            then(self._shard.fail(key, stage, result.ticket, worker, result.error))
            return
        stored = self._shard.holdings.find(key)
        tokens = 0 if stored is None else stored.record.tokens
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

    async def _fetch(self, _: Call, body: GetGroups) -> Answer:
        if len(body.groups) > MAX_ROWS or len(set(body.groups)) < len(body.groups):
            raise Refused(
                Code.OVERSIZE, f"{len(body.groups)} groups requested; at most {MAX_ROWS} distinct groups at once"
            )
        if len(body.groups) != len(body.shas):
            raise Refused(
                Code.MALFORMED, f"{len(body.groups)} groups with {len(body.shas)} shas; the numbers must match"
            )
        wanted = [await self._wanted(group, sha) for group, sha in zip(body.groups, body.shas, strict=True)]
        rows = {group: row or _OVER for group, row in (await self._prompts.fetch(body.groups)).items()}
        maps = body.host == boot_id() and self._shard.slabs is not None
        try:
            if maps or body.checks:
                return self._packed(wanted, rows, maps=maps)
            return await self._checked_arrays(wanted, rows)
        except CorruptRecord as corrupt:
            await self._shard.quarantine(corrupt)
            raise Refused(Code.STALE, f"{corrupt}; it is quarantined") from corrupt

    def _packed(
        self, wanted: Sequence[StoredGroup], rows: Mapping[GroupId, Row], *, maps: bool
    ) -> tuple[Groups, list[memoryview]]:
        """Return payloads as they are stored, for a reader that checks them. ``maps``: send only the place in a
        slab, if there is one."""
        columns, frames = join_columns(self._shard.read_columns(wanted))
        groups: list[GroupFrames] = []
        for stored in wanted:
            data, place = self._shard.view_payload(stored), place_of(stored) if maps else None
            if place is None:
                frames.append(data)
            group = stored.key.group
            groups.append(GroupFrames(group=group, row=rows[group], frames=[], place=place, packed=place is None))
        folder = self._shard.slabs.folder if maps and self._shard.slabs is not None else ""
        return Groups(groups=groups, folder=folder, columns=columns), frames

    async def _checked_arrays(
        self, wanted: Sequence[StoredGroup], rows: Mapping[GroupId, Row]
    ) -> tuple[Groups, list[memoryview]]:
        """Return all arrays of each group, their payload checked in a thread."""
        groups: list[GroupFrames] = []
        frames: list[memoryview] = []
        for start in range(0, len(wanted), FETCH_AT_ONCE):
            some = wanted[start : start + FETCH_AT_ONCE]
            columns = self._shard.read_columns(some)
            blobs = [self._shard.read_payload(stored) for stored in some]
            payloads = await asyncio.to_thread(_checked, some, blobs)
            for stored, payload, stage_columns in zip(some, payloads, columns, strict=True):
                specs, more = specs_and_frames(payload | stage_columns)
                frames += more
                groups.append(GroupFrames(group=stored.key.group, row=rows[stored.key.group], frames=specs))
        return Groups(groups=groups), frames

    async def _wanted(self, group: GroupId, sha: str) -> StoredGroup:
        stored = self._shard.holdings.find_sha(group, sha)
        if stored is not None and self._shard.is_whole(stored):
            return stored
        # A worker has pushed the same bytes again after a disk was lost: the stages recompute their columns first.
        if stored is not None and stored.phase is not Phase.SETTLED:
            raise Refused(Code.BUSY, f"group {group} is going through its stages again")
        if await self._shard.missing(group, sha):
            self._check_stock_now.set()
        raise Refused(Code.STALE, f"group {group} with sha {shortened(sha)} is not here")

    # Housekeeping ----------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Recover the stored groups, then run the background tasks until cancelled."""
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
        """Long-poll the scheduler for the limits of the model and apply every change."""
        while True:
            request = GetModelLimits(known=self._model)
            try:
                self._model = await self._scheduler.ask(request, ModelLimits, timeout_s=None)
            except Refused:  # the run is over
                return
            self._limits = replace(self._limits, model=self._model)

    async def _take_stock(self) -> None:
        """Give up groups that the ledger expects and the shard lacks: once at the start, and again whenever a
        trainer requests a missing group that a rollback brought back."""
        while True:
            self._check_stock_now.clear()
            await take_stock(self._scheduler, self._shard)
            await self._check_stock_now.wait()

    async def _retain(self) -> None:
        """Request retention decisions every ``RETAIN_INTERVAL_S``, after many pushes, and soon after a push found no
        room."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RETAIN_INTERVAL_S):
                    await self._retain_now.wait()
            if self._full:
                await asyncio.sleep(BUSY_MS / 1000)
            self._retain_now.clear()
            self._full, self._pushed_bytes = False, 0
            asked = self._shard.retainable()
            for start in range(0, len(asked), RETAIN_GROUPS):
                await self._retain_some(asked[start : start + RETAIN_GROUPS])
            self._shard.commit()

    async def _retain_some(self, asked: Sequence[Key]) -> None:
        groups = list(dict.fromkeys(key.group for key in asked))
        request = GetRetained(shard=self._shard.shard, groups=groups)
        try:
            answer = await self._scheduler.ask(request, Retained, timeout_s=None)
        except Refused:  # the run is over: nothing is deleted after that
            return
        self._shard.retain(asked, set(answer.keep))


def _checked(wanted: Sequence[StoredGroup], blobs: Sequence[bytes]) -> list[dict[str, Array]]:
    return [unpack_verified(stored.key, stored.record, blob) for stored, blob in zip(wanted, blobs, strict=True)]


def _split(counts: Sequence[int], frames: list[memoryview]) -> list[list[memoryview]]:
    """Split the frames of a message by item. Raise ``ProtocolError`` if the counts do not add up."""
    if sum(counts) != len(frames):
        raise ProtocolError(Code.MALFORMED, f"{sum(counts)} frames announced, {len(frames)} received")
    parts: list[list[memoryview]] = []
    start = 0
    for count in counts:
        parts.append(frames[start : start + count])
        start += count
    return parts
