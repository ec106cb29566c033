"""One rollout instance of a run: execute the scheduler's commands on an engine and push finished groups to the shards.

Consumes commands (from long-polled reports), prompt rows and versions; produces pushed groups. Each part waits only for
its own input:

- the report loop renews the leases and reports which are held. It pauses while an engine step takes long, so the
  leases of a hung engine expire like those of a dead one;
- a group's task runs from row to payload; an error inside it costs only that group and is named in the release;
- pulls and pushes run beside the engine, which waits for neither.

If the scheduler or a shard is unreachable, the worker waits for it while the engine continues.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.prompts import Encode, prompt_of
from staleflow.clients.rollout.engines.base import AsyncEngine, EngineError, RequestError
from staleflow.clients.rollout.episodes.env_runner import EpisodeFailed
from staleflow.clients.rollout.episodes.environment import Environments
from staleflow.clients.rollout.groups import ActiveLease, GroupSamples, PartialGroup, Recipe, interrupt, leave
from staleflow.clients.rollout.pulls import Pulls
from staleflow.clients.rollout.pushes import Pusher
from staleflow.clients.rollout.slab_writer import SlabWriter
from staleflow.clients.rollout.transfers import MAX_ROWS_BYTES, fetch_rows, hand_over
from staleflow.clients.weights import Puller
from staleflow.configs.errors import ConfigError
from staleflow.net.adaptive_chunks import AdaptiveChunk
from staleflow.net.client import Client
from staleflow.net.errors import Refused, Unavailable
from staleflow.process.rate_limited_log import RateLimitedLog
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import LeaseId, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import (
    Abort,
    Assign,
    Command,
    Commands,
    Detach,
    Done,
    InstanceStats,
    Interrupt,
    Operations,
    Pull,
    RegisterRelease,
    Report,
    Result,
    Results,
    Yield,
)
from staleflow.protocols.wire.trajectory import GroupPayload

log = logging.getLogger(__name__)

STUCK_TIMEOUT_S = 1.0
"""A longer engine step renews no lease until it returns."""
POLL_INTERVAL_S = 0.05
REPORT_INTERVAL_S = 1.0
DRAIN_TIMEOUT_S = 5.0
"""Maximum time to finish held groups of a draining run; the servers that would take them end as well."""
LEAVE_TIMEOUT_S = 2.0
"""Time limit for the last pushes of a leaving worker, and then for its detach request."""


class RowError(Exception):
    """The prompt row is invalid."""


class Worker:
    """Owns the held leases. Create and use it inside one event loop."""

    def __init__(
        self,
        me: WorkerId,
        scheduler: Client,
        shards: list[Client],
        puller: Puller,
        engine: AsyncEngine,
        encode: Encode,
        recipe: Recipe,
        environments: Environments | None = None,
        *,
        report_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self._me = me
        self._scheduler = scheduler
        self._shards = shards
        self._portions = [AdaptiveChunk(MAX_ROWS_BYTES) for _ in shards]
        self._engine = engine
        self._encode = encode
        self._recipe = recipe
        self._environments = environments
        self._report_ms = round(report_s * 1000)
        self._pulls = Pulls(me, scheduler, puller, engine, self._loaded)
        self._pushers = [Pusher(shard, me, self._settled, SlabWriter(shard, me)) for shard in shards]
        self._leases: dict[LeaseId, ActiveLease] = {}
        self._ack = 0
        self._draining = False
        self._report_now = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pushing: list[asyncio.Task[None]] = []
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log_limiter = RateLimitedLog()
        self.counts = {"pushed": 0, "moved": 0, "discarded": 0, "released": 0, "loaded": 0}

    async def run(self) -> None:
        """Work until the run has drained, or raise the error that ended it. To stop early, cancel, then ``leave``."""
        self._spawn(self._reports())
        self._spawn(self._pulls.run())
        self._pushing = [self._spawn(pusher.run()) for pusher in self._pushers]
        await asyncio.wait((self._end, self._engine.failure), return_when=asyncio.FIRST_COMPLETED)
        if self._engine.failure.done() and self._leases:
            groups = ", ".join(str(active.assign.group) for active in self._leases.values())
            log.error("engine of %s failed, releasing the leases of its groups: %s", self._me, groups)
        for end in (self._engine.failure, self._end):
            if end.done():
                end.result()

    async def leave(self, why: str) -> None:
        """Stop, wait briefly for finished groups to arrive, and detach; the scheduler releases the remaining leases."""
        for task in self._tasks.difference(self._pushing):
            task.cancel()
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                for pusher in self._pushers:
                    await pusher.idle.wait()
        except TimeoutError:
            log.warning("finished groups not delivered: a trajectory server does not reply")
        for task in self._pushing:
            task.cancel()
        try:
            await self._scheduler.ask(Detach(worker=self._me, why=why), Done, timeout_s=LEAVE_TIMEOUT_S)
        except (Refused, Unavailable, ProtocolError) as error:
            log.warning("detach failed: %s", error)
        log.info("left (%s): %s", why, ", ".join(f"{count} {name}" for name, count in self.counts.items()))

    # --- reports and commands ---

    async def _reports(self) -> None:
        while True:
            if self._engine.stuck_s() > STUCK_TIMEOUT_S:
                await asyncio.sleep(POLL_INTERVAL_S)
                continue
            # Clear before reading the state: a version loaded during the request then triggers another report.
            self._report_now.clear()
            report = Report(
                worker=self._me, ack=self._ack, held=list(self._leases), stats=self._stats(), wait_ms=self._report_ms
            )
            answer = asyncio.ensure_future(self._scheduler.ask(report, Commands, timeout_s=None))
            wake = asyncio.ensure_future(self._report_now.wait())
            try:
                await asyncio.wait((answer, wake), return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    self._execute(answer.result())
            except Refused as no:
                if no.code is Code.FENCED:
                    raise ConfigError("rollout worker", self._me, no.detail) from no
                raise
            finally:
                answer.cancel()
                wake.cancel()

    def _execute(self, commands: Commands) -> None:
        assigned: dict[int, list[ActiveLease]] = {}
        for number, command in enumerate(commands.commands, start=commands.first):
            if number > self._ack:  # commands are sent again until a report acknowledges them
                self._ack = number
                self._command(command, assigned)
        for shard, active in assigned.items():
            self._spawn(self._start(shard, active))
        if commands.drain and not self._draining:
            asyncio.get_running_loop().call_later(DRAIN_TIMEOUT_S, self._finish)
        self._draining = commands.drain
        self._check_drained()

    def _command(self, command: Command, assigned: dict[int, list[ActiveLease]]) -> None:
        match command:
            case Assign():
                if command.lease not in self._leases:
                    active = self._leases[command.lease] = ActiveLease(command)
                    assigned.setdefault(command.shard, []).append(active)
            case Pull():
                self._pulls.order(command.lineage, command.version)
            case Interrupt():
                if (cut := self._leases.get(command.lease)) is not None:
                    interrupt(self._engine, cut)
            case Yield():
                if (leaving := self._leases.get(command.lease)) is not None and self._environments is None:
                    leave(self._engine, leaving)
            case Abort():
                self._abort(command.lease)

    def _abort(self, lease: LeaseId) -> None:
        active = self._leases.get(lease)
        if active is None or (active.pushing and not self._pushers[active.assign.shard].drop(active.assign)):
            return  # finished, or its push is in progress and will report the outcome
        if active.task is not None:
            active.task.cancel()
        self._drop_lease(active.assign)

    def _stats(self) -> InstanceStats:
        stats, engine, environments = self._engine.stats(), self._engine, self._environments
        lineage, version = self._pulls.loaded
        fetching = sum(active.task is None for active in self._leases.values())  # their rows have not arrived yet
        return InstanceStats(
            lineage=lineage,
            version=version,
            running=stats.running,
            waiting=stats.waiting + fetching * self._recipe.started,
            kv_used=stats.kv_used,
            kv_tokens=stats.kv_tokens,
            kv_capacity=stats.kv_capacity,
            slots=stats.slots,
            tokens_per_s=engine.tokens_per_s(),
            generated_tokens=stats.generated_tokens,
            steps=stats.steps,
            busy_s=engine.busy_s(),
            episodes=environments.under_way if environments is not None else 0,
            episodes_waiting=environments.waiting if environments is not None else 0,
        )

    # --- groups ---

    async def _start(self, shard: int, assigned: list[ActiveLease]) -> None:
        """Fetch the rows and start each group's task."""
        try:
            assigns = [active.assign for active in assigned]
            rows, partial = await fetch_rows(self._shards[shard], self._portions[shard], assigns, self._recipe)
        except Refused as no:
            for active in assigned:
                self._give_up(active, f"its prompt row is refused: {no}")
            return
        for active, row in zip(assigned, rows, strict=True):
            if active.assign.lease in self._leases:
                active.task = self._spawn(self._produce(active, row, partial.get(active.assign.lease)))

    async def _produce(self, active: ActiveLease, row: Mapping[str, Any], partial: PartialGroup | None) -> None:
        assign = active.assign
        try:
            if not await self._pulls.wait_loaded(assign.lineage, assign.version):
                self._give_up(active, f"version {assign.version} is not loaded here")
                return
            if self._environments is None:
                group = await self._generate(active, self._prompt_ids(row), partial)
            else:
                group = await self._environments.produce(active, row)
            if group is not None:
                self._pushers[assign.shard].put(assign, group)
        except (RowError, RequestError) as error:
            self._give_up(active, str(error), hopeless=True)
            return
        except EpisodeFailed as error:
            self._give_up(active, f"at {self._me}, {error}")
            return
        except ProtocolError as error:  # after a rollback, the engine loads an older version within a sample
            self._give_up(active, f"invalid payload from {self._me}: {error}")
            return
        if group is None:
            self.counts["moved"] += 1
            self._drop_lease(assign)
            return
        active.pushing = True

    async def _generate(
        self, active: ActiveLease, prompt_ids: NDArray[np.int32], partial: PartialGroup | None
    ) -> GroupPayload | None:
        """Return the group once its samples have ended; None if it continues elsewhere.

        Samples started by newer weights than the loaded ones start over, since versions never decrease in a sample.
        """
        if partial is not None and (newest := partial.newest()) and not await self._pulls.wait_loaded(*newest):
            partial = None
        try:
            return await self._run_samples(active, prompt_ids, partial)
        except RequestError as error:
            if partial is None:
                raise
            log.warning("group %d starts over without the samples of another worker: %s", active.assign.group, error)
            return await self._run_samples(active, prompt_ids, None)

    async def _run_samples(
        self, active: ActiveLease, prompt_ids: NDArray[np.int32], partial: PartialGroup | None
    ) -> GroupPayload | None:
        samples = GroupSamples(self._engine, active, prompt_ids, self._recipe, partial)
        while not await samples.run():
            if await hand_over(active.assign, samples.partial(), self._shards[active.assign.shard], self._scheduler):
                return None
            active.leaving = False
        return samples.payload()

    def _prompt_ids(self, row: Mapping[str, Any]) -> NDArray[np.int32]:
        prompt = prompt_of(row)
        if prompt is None:
            raise RowError(f"its prompt is {type(row.get('prompt')).__name__}, not text")
        try:
            return self._encode(prompt)
        except ValueError as error:
            raise RowError(str(error)) from error

    def _settled(self, assign: Assign, result: Result) -> None:
        """Handle the shard's verdict on a push."""
        if result.code is None or result.code is Code.DUPLICATE:
            self.counts["pushed"] += 1
            self._drop_lease(assign)
        elif result.code in (Code.STALE_LEASE, Code.STALE):
            self.counts["discarded"] += 1
            log.info("group %d, lease %d: discarded, %s", assign.group, assign.lease, result.detail or result.code)
            self._drop_lease(assign)
        elif (active := self._leases.get(assign.lease)) is not None:
            self._give_up(active, f"its push was rejected: {result.code.value} {result.detail}")

    def _give_up(self, active: ActiveLease, detail: str, *, hopeless: bool = False) -> None:
        """Release a lease that is unservable here, or anywhere if ``hopeless``; held until the scheduler confirms."""
        assign = active.assign
        self.counts["released"] += 1
        if (more := self._log_limiter.due()) is not None:
            log.warning("group %d, lease %d: released, %s%s", assign.group, assign.lease, detail, more)
        why, detail = ReleaseWhy.ABORTED, f"group {assign.group}: {detail}"
        op = RegisterRelease(group=assign.group, lease=assign.lease, why=why, detail=detail, hopeless=hopeless)
        self._spawn(self._release(assign, op))

    async def _release(self, assign: Assign, op: RegisterRelease) -> None:
        try:
            await self._scheduler.ask(Operations(ops=[op]), Results, timeout_s=None)
        except Refused as no:
            log.warning("group %d: release rejected: %s", assign.group, no)
        self._drop_lease(assign)

    def _drop_lease(self, assign: Assign) -> None:
        """End a lease on this worker."""
        self._leases.pop(assign.lease, None)
        self._check_drained()

    def _check_drained(self) -> None:
        if self._draining and not self._leases:
            self._finish()

    def _finish(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def _loaded(self) -> None:
        """Report new weights at once, as the scheduler may now assign groups of that version."""
        self.counts["loaded"] += 1
        self._report_now.set()

    # --- tasks ---

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """End the worker if a task fails; the engine reports its own errors through ``failure``."""
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, EngineError) and not self._end.done():
            self._end.set_exception(error)
