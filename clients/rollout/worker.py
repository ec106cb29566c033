"""One rollout instance of a run: the scheduler's commands to an engine, finished groups to the shards.

Consumes commands (held reports), prompt rows and versions; produces pushed groups. Each waits for its own thing only:

- the report loop renews the leases and says what is held. It keeps still while a step of the engine takes long, so the
  leases of an engine that hangs expire as those of a dead one do;
- a group's task runs from row to payload; what goes wrong inside it costs that group alone, named in the release;
- pulls and pushes run beside the engine, which waits for neither.

A scheduler or shard that is away is waited for; what the engine holds goes on meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import AsyncEngine, EngineError, RequestError
from staleflow.clients.rollout.episodes.env_runner import EpisodeFailed
from staleflow.clients.rollout.episodes.environment import Environments
from staleflow.clients.rollout.groups import Begun, Held, Recipe, Samples, interrupt, leave
from staleflow.clients.rollout.pulls import Pulls
from staleflow.clients.rollout.pushes import Pusher
from staleflow.clients.rollout.slab_writer import SlabWriter
from staleflow.clients.rollout.transfers import ROWS_BYTES, arrived, hand_over
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

Encode = Callable[[str], NDArray[np.int32]]

STUCK_S = 1.0
"""A step that takes longer renews no lease until it returns."""
POLL_INTERVAL_S = 0.05
REPORT_S = 1.0
DRAIN_S = 5.0
"""How long a worker of a run that drains goes on with what it holds: the servers it would go to end as well."""
LEAVE_S = 2.0
"""How long a worker that leaves waits for its last pushes, and then for the answer to its goodbye."""


class RowError(Exception):
    """A prompt row that cannot be written from."""


class Worker:
    """Owns the held leases; made and used inside one event loop."""

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
        report_s: float = REPORT_S,
    ) -> None:
        self._me = me
        self._scheduler = scheduler
        self._shards = shards
        self._portions = [AdaptiveChunk(ROWS_BYTES) for _ in shards]
        self._engine = engine
        self._encode = encode
        self._recipe = recipe
        self._environments = environments
        self._report_ms = round(report_s * 1000)
        self._pulls = Pulls(me, scheduler, puller, engine, self._loaded)
        self._pushers = [Pusher(shard, me, self._settled, SlabWriter(shard, me)) for shard in shards]
        self._held: dict[LeaseId, Held] = {}
        self._ack = 0
        self._draining = False
        self._report_now = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pushing: list[asyncio.Task[None]] = []
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._said = RateLimitedLog()
        self.counts = {"pushed": 0, "moved": 0, "thrown_away": 0, "released": 0, "loaded": 0}

    async def run(self) -> None:
        """Work until the run has drained; raise what ended it otherwise. Cancel it to stop early, then ``leave``."""
        self._spawn(self._reports())
        self._spawn(self._pulls.run())
        self._pushing = [self._spawn(pusher.run()) for pusher in self._pushers]
        await asyncio.wait((self._end, self._engine.failure), return_when=asyncio.FIRST_COMPLETED)
        if self._engine.failure.done() and self._held:
            groups = ", ".join(str(held.assign.group) for held in self._held.values())
            log.error("the engine of %s failed; the leases of its groups go back: %s", self._me, groups)
        for end in (self._engine.failure, self._end):
            if end.done():
                end.result()

    async def leave(self, why: str) -> None:
        """Stop, give finished groups a moment to arrive, say goodbye: the scheduler releases what is still held."""
        for task in self._tasks.difference(self._pushing):
            task.cancel()
        try:
            async with asyncio.timeout(LEAVE_S):
                for pusher in self._pushers:
                    await pusher.idle.wait()
        except TimeoutError:
            log.warning("finished groups are left behind: a trajectory server does not answer")
        for task in self._pushing:
            task.cancel()
        try:
            await self._scheduler.ask(Detach(worker=self._me, why=why), Done, timeout_s=LEAVE_S)
        except (Refused, Unavailable, ProtocolError) as error:
            log.warning("left without a goodbye: %s", error)
        log.info("left (%s): %s", why, ", ".join(f"{count} {name}" for name, count in self.counts.items()))

    # --- reports and commands ---

    async def _reports(self) -> None:
        while True:
            if self._engine.stuck_s() > STUCK_S:
                await asyncio.sleep(POLL_INTERVAL_S)
                continue
            self._report_now.clear()
            report = Report(
                worker=self._me, ack=self._ack, held=list(self._held), stats=self._stats(), wait_ms=self._report_ms
            )
            answer = asyncio.ensure_future(self._scheduler.ask(report, Commands, timeout_s=None))
            wake = asyncio.ensure_future(self._report_now.wait())
            try:
                await asyncio.wait((answer, wake), return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    self._obey(answer.result())
            except Refused as no:
                if no.code is Code.FENCED:
                    raise ConfigError("rollout worker", self._me, no.detail) from no
                raise
            finally:
                answer.cancel()
                wake.cancel()

    def _obey(self, commands: Commands) -> None:
        assigned: dict[int, list[Held]] = {}
        for number, command in enumerate(commands.commands, start=commands.first):
            if number > self._ack:
                self._ack = number
                self._command(command, assigned)
        for shard, held in assigned.items():
            self._spawn(self._start(shard, held))
        if commands.drain and not self._draining:
            asyncio.get_running_loop().call_later(DRAIN_S, self._finish)
        self._draining = commands.drain
        self._check_drained()

    def _command(self, command: Command, assigned: dict[int, list[Held]]) -> None:
        match command:
            case Assign():
                if command.lease not in self._held:
                    held = self._held[command.lease] = Held(command)
                    assigned.setdefault(command.shard, []).append(held)
            case Pull():
                self._pulls.order(command.lineage, command.version)
            case Interrupt():
                if (cut := self._held.get(command.lease)) is not None:
                    interrupt(self._engine, cut)
            case Yield():
                if (leaving := self._held.get(command.lease)) is not None and self._environments is None:
                    leave(self._engine, leaving)
            case Abort():
                self._abort(command.lease)

    def _abort(self, lease: LeaseId) -> None:
        held = self._held.get(lease)
        if held is None or (held.pushing and not self._pushers[held.assign.shard].drop(held.assign)):
            return  # over, or its push is under way and will tell
        if held.task is not None:
            held.task.cancel()
        self._forget(held.assign)

    def _stats(self) -> InstanceStats:
        stats, engine, environments = self._engine.stats(), self._engine, self._environments
        lineage, version = self._pulls.loaded
        fetching = sum(held.task is None for held in self._held.values())  # their rows are on the way
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

    async def _start(self, shard: int, assigned: list[Held]) -> None:
        """Fetch the rows and let each group's task begin."""
        try:
            assigns = [held.assign for held in assigned]
            rows, begun = await arrived(self._shards[shard], self._portions[shard], assigns, self._recipe)
        except Refused as no:
            for held in assigned:
                self._give_up(held, f"its prompt row is refused: {no}")
            return
        for held, row in zip(assigned, rows, strict=True):
            if held.assign.lease in self._held:
                held.task = self._spawn(self._produce(held, row, begun.get(held.assign.lease)))

    async def _produce(self, held: Held, row: Mapping[str, Any], begun: Begun | None) -> None:
        assign = held.assign
        try:
            if not await self._pulls.reached(assign.lineage, assign.version):
                self._give_up(held, f"version {assign.version} is not loaded here")
                return
            if self._environments is None:
                group = await self._written(held, self._prompt_ids(row), begun)
            else:
                group = await self._environments.produce(held, row)
            if group is not None:
                self._pushers[assign.shard].put(assign, group)
        except (RowError, RequestError) as error:
            self._give_up(held, str(error), hopeless=True)
            return
        except EpisodeFailed as error:
            self._give_up(held, f"at {self._me}, {error}")
            return
        except ProtocolError as error:  # after a rollback the engine goes back to an older version inside a sample
            self._give_up(held, f"what {self._me} wrote is no payload: {error}")
            return
        if group is None:
            self.counts["moved"] += 1
            self._forget(assign)
            return
        held.pushing = True

    async def _written(self, held: Held, prompt_ids: NDArray[np.int32], begun: Begun | None) -> GroupPayload | None:
        """The group once its samples have ended; None when it goes on elsewhere.

        What newer weights than the loaded ones began is begun anew: versions never fall within a sample.
        """
        if begun is not None and (newest := begun.newest()) and not await self._pulls.reached(*newest):
            begun = None
        try:
            return await self._through(held, prompt_ids, begun)
        except RequestError as error:
            if begun is None:
                raise
            log.warning("group %d begins again without what another worker wrote: %s", held.assign.group, error)
            return await self._through(held, prompt_ids, None)

    async def _through(self, held: Held, prompt_ids: NDArray[np.int32], begun: Begun | None) -> GroupPayload | None:
        samples = Samples(self._engine, held, prompt_ids, self._recipe, begun)
        while not await samples.go_on():
            if await hand_over(held.assign, samples.begun(), self._shards[held.assign.shard], self._scheduler):
                return None
            held.leaving = False
        return samples.payload()

    def _prompt_ids(self, row: Mapping[str, Any]) -> NDArray[np.int32]:
        prompt = row.get("prompt")
        if not isinstance(prompt, str):
            raise RowError(f"its prompt is {type(prompt).__name__}, not text")
        return self._encode(prompt)

    def _settled(self, assign: Assign, result: Result) -> None:
        """The shard's verdict on a push."""
        if result.code is None or result.code is Code.DUPLICATE:
            self.counts["pushed"] += 1
            self._forget(assign)
        elif result.code in (Code.STALE_LEASE, Code.STALE):
            self.counts["thrown_away"] += 1
            log.info("group %d, lease %d: thrown away, %s", assign.group, assign.lease, result.detail or result.code)
            self._forget(assign)
        elif (held := self._held.get(assign.lease)) is not None:
            self._give_up(held, f"its push is refused: {result.code.value} {result.detail}")

    def _give_up(self, held: Held, detail: str, *, hopeless: bool = False) -> None:
        """Release a lease that cannot be served, here at all when it is hopeless. Held until the scheduler knows."""
        assign = held.assign
        self.counts["released"] += 1
        if (more := self._said.due()) is not None:
            log.warning("group %d, lease %d: given up, %s%s", assign.group, assign.lease, detail, more)
        why, detail = ReleaseWhy.ABORTED, f"group {assign.group}: {detail}"
        op = RegisterRelease(group=assign.group, lease=assign.lease, why=why, detail=detail, hopeless=hopeless)
        self._spawn(self._release(assign, op))

    async def _release(self, assign: Assign, op: RegisterRelease) -> None:
        try:
            await self._scheduler.ask(Operations(ops=[op]), Results, timeout_s=None)
        except Refused as no:
            log.warning("group %d: its release is refused: %s", assign.group, no)
        self._forget(assign)

    def _forget(self, assign: Assign) -> None:
        """The lease is over."""
        self._held.pop(assign.lease, None)
        self._check_drained()

    def _check_drained(self) -> None:
        if self._draining and not self._held:
            self._finish()

    def _finish(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def _loaded(self) -> None:
        """New weights: the scheduler may assign groups of that version from now on."""
        self.counts["loaded"] += 1
        self._report_now.set()

    # --- tasks ---

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """A task that fails ends the worker; the error of an engine is told by the engine itself."""
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, EngineError) and not self._end.done():
            self._end.set_exception(error)
