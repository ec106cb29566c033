"""The leases of one attached rollout worker, whatever generates its groups.

``LeaseSession`` is the protocol side of a rollout worker: it reports, executes the scheduler's commands, fetches prompt
rows, pulls versions, pushes finished groups and releases the others. A ``Producer`` is the other side: it turns a row
into a group and loads weights. The shipped worker produces with an engine (``worker.Worker``), the public client with
the code of its user (``client.AsyncRolloutClient``).

- The report loop renews the leases and reports which are held. It pauses while the producer is stuck, so the leases of
  a hung engine expire like those of a dead one.
- A group's task runs from row to payload; an error inside it costs only that group and is named in the release.
- Pulls and pushes run beside the producer, which waits for neither.

If the scheduler or a shard is unreachable, the session waits for it while the producer continues.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from staleflow.clients.evaluation.evaluator import Evaluator
from staleflow.clients.rollout.engines.base import EngineError
from staleflow.clients.rollout.groups import ActiveLease, PartialGroup, Recipe
from staleflow.clients.rollout.pulls import Pulls
from staleflow.clients.rollout.pushes import Pusher
from staleflow.clients.rollout.slab_writer import SlabWriter
from staleflow.clients.rollout.transfers import MAX_ROWS_BYTES, fetch_rows
from staleflow.clients.weights import PulledVersion, Puller
from staleflow.configs.errors import ConfigError
from staleflow.net.adaptive_chunks import AdaptiveChunk
from staleflow.net.client import Client
from staleflow.net.errors import Refused, Unavailable
from staleflow.process.rate_limited_log import RateLimitedLog
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import (
    Abort,
    Assign,
    Command,
    Commands,
    Detach,
    Done,
    EndEvaluation,
    Evaluate,
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
"""A producer that is stuck for longer renews no lease until it continues."""
POLL_INTERVAL_S = 0.05
REPORT_INTERVAL_S = 1.0
DRAIN_TIMEOUT_S = 5.0
"""Maximum time to finish held groups of a draining run; the servers that would take them end as well."""
HANDOVER_INTERVAL_S = 1.0
"""Interval between two attempts of a leaving worker to hand over the groups that it still has. Each attempt costs the
engine a prefill of the groups that stay."""
LEAVE_TIMEOUT_S = 2.0
"""Time limit for the last pushes of a leaving worker, and then for its detach request."""


class GiveUp(Exception):
    """The producer cannot make this group. ``hopeless``: no worker of the run can."""

    def __init__(self, detail: str, *, hopeless: bool = False) -> None:
        super().__init__(detail)
        self.hopeless = hopeless


class Producer(Protocol):
    """The part of a rollout worker that generates."""

    failure: "asyncio.Future[None]"
    """Set to the exception that ended the producer, if it fails."""

    async def produce(
        self, active: ActiveLease, row: Mapping[str, Any], partial: PartialGroup | None
    ) -> GroupPayload | None:
        """Return the group; None if it has moved to another instance. Raise ``GiveUp`` or ``ProtocolError`` to release
        its lease. The call is cancelled if the lease ends."""
        ...

    def interrupt(self, active: ActiveLease) -> None:
        """Finish a group with the tokens so far."""
        ...

    def leave_group(self, active: ActiveLease) -> None:
        """Hand a group over to another instance. A producer that cannot do so ignores the order."""
        ...

    def settled(self, active: ActiveLease, result: Result) -> None:
        """Note the final result of a group's push."""
        ...

    def stats(self, fetching: int) -> InstanceStats:
        """Return current numbers; the session fills in the loaded weights. ``fetching``: number of groups without a
        row yet."""
        ...

    def stuck_s(self) -> float:
        """Return for how many seconds the producer has made no progress although it should."""
        ...

    async def load(self, lineage: Lineage, version: Version, weights: PulledVersion) -> None:
        """Load these weights; they stay readable until the call returns. Raise ``LoadError`` if they do not fit."""
        ...


class LeaseSession:
    """Owns the held leases. Create and use it inside one event loop."""

    def __init__(
        self,
        me: WorkerId,
        scheduler: Client,
        shards: list[Client],
        puller: Puller,
        producer: Producer,
        recipe: Recipe,
        *,
        evaluator: Evaluator | None = None,
        report_s: float = REPORT_INTERVAL_S,
    ) -> None:
        """``evaluator``: plays evaluations; None if the scheduler orders none, because ``Attach`` named no prompts."""
        self._me = me
        self._scheduler = scheduler
        self._shards = shards
        self._portions = [AdaptiveChunk(MAX_ROWS_BYTES) for _ in shards]
        self._producer = producer
        self._recipe = recipe
        self._evaluator = evaluator
        self._report_ms = round(report_s * 1000)
        self.pulls = Pulls(me, scheduler, puller, producer.load, self._loaded)
        self._pushers = [Pusher(shard, me, self._settled, SlabWriter(shard, me)) for shard in shards]
        self._leases: dict[LeaseId, ActiveLease] = {}
        self._ack = 0
        self._draining = False
        self.leaving = False
        """It hands its groups over to other workers, and gets no more of them."""
        self._leaving_known = asyncio.Event()
        """Set once the scheduler has replied to a report that it leaves: no assigned group is still on its way."""
        self._report_now = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pushing: list[asyncio.Task[None]] = []
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log_limiter = RateLimitedLog()
        self.counts = {"pushed": 0, "moved": 0, "discarded": 0, "released": 0, "loaded": 0}

    async def run(self) -> None:
        """Work until the run has drained, or raise the error that ended it. To stop early, cancel, then ``leave``."""
        self._spawn(self._reports())
        self._spawn(self.pulls.run())
        self._pushing = [self._spawn(pusher.run()) for pusher in self._pushers]
        failure = self._producer.failure
        await asyncio.wait((self._end, failure), return_when=asyncio.FIRST_COMPLETED)
        if failure.done() and self._leases:
            groups = ", ".join(str(active.assign.group) for active in self._leases.values())
            log.error("engine of %s failed, releasing the leases of its groups: %s", self._me, groups)
        for end in (failure, self._end):
            if end.done():
                end.result()

    async def hand_over(self, timeout_s: float) -> None:
        """Hand the groups over to other workers; return once none is left here, or after ``timeout_s``.

        The worker continues meanwhile: it pushes the groups that finish, and offers the others again and again, as
        places at other workers become free. Then cancel ``run``, and ``leave``.
        """
        self.leaving = True
        self._report_now.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._leaving_known.wait()
                while self._leases and not self._end.done():
                    for active in self._leases.values():
                        if not active.pushing:
                            self._producer.leave_group(active)
                    await asyncio.sleep(HANDOVER_INTERVAL_S)

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
            if self._producer.stuck_s() > STUCK_TIMEOUT_S:
                await asyncio.sleep(POLL_INTERVAL_S)
                continue
            # Clear before reading the state: a version loaded during the request then triggers another report.
            self._report_now.clear()
            leaving = self.leaving
            report = Report(
                worker=self._me,
                ack=self._ack,
                held=list(self._leases),
                stats=self._stats(),
                wait_ms=0 if leaving and not self._leaving_known.is_set() else self._report_ms,
                evaluation=0 if self._evaluator is None else self._evaluator.ticket,
                leaving=leaving,
            )
            answer = asyncio.ensure_future(self._scheduler.ask(report, Commands, timeout_s=None))
            wake = asyncio.ensure_future(self._report_now.wait())
            try:
                await asyncio.wait((answer, wake), return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    self._execute(answer.result())
                    if leaving:
                        self._leaving_known.set()
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
                self.pulls.order(command.lineage, command.version)
            case Interrupt():
                if (cut := self._leases.get(command.lease)) is not None:
                    self._producer.interrupt(cut)
            case Yield():
                if (leaving := self._leases.get(command.lease)) is not None:
                    self._producer.leave_group(leaving)
            case Abort():
                self._abort(command.lease)
            case Evaluate():
                if self._evaluator is not None:
                    self._watch(self._evaluator.start(command, self.pulls))
            case EndEvaluation():
                if self._evaluator is not None:
                    self._evaluator.end(command.ticket)

    def _abort(self, lease: LeaseId) -> None:
        active = self._leases.get(lease)
        if active is None or (active.pushing and not self._pushers[active.assign.shard].drop(active.assign)):
            return  # finished, or its push is in progress and will report the outcome
        if active.pushing:
            self._producer.settled(active, Result(code=Code.STALE_LEASE, detail="the lease has ended"))
        if active.task is not None:
            active.task.cancel()
        self._drop_lease(active.assign)

    def _stats(self) -> InstanceStats:
        lineage, version = self.pulls.loaded
        fetching = sum(active.task is None for active in self._leases.values())  # their rows have not arrived yet
        return msgspec.structs.replace(self._producer.stats(fetching), lineage=lineage, version=version)

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
            if not await self.pulls.wait_loaded(assign.lineage, assign.version):
                self._give_up(active, f"version {assign.version} is not loaded here")
                return
            group = await self._producer.produce(active, row, partial)
            if group is not None:
                self._pushers[assign.shard].put(assign, group)
        except GiveUp as why:
            self._give_up(active, str(why), hopeless=why.hopeless)
            return
        except ProtocolError as error:  # after a rollback, the engine loads an older version within a sample
            self._give_up(active, f"invalid payload from {self._me}: {error}")
            return
        if group is None:
            self.counts["moved"] += 1
            self._drop_lease(assign)
            return
        active.pushing = True

    def _settled(self, assign: Assign, result: Result) -> None:
        """Handle the shard's verdict on a push."""
        active = self._leases.get(assign.lease)
        if active is not None:
            self._producer.settled(active, result)
        if result.code is None or result.code is Code.DUPLICATE:
            self.counts["pushed"] += 1
            self._drop_lease(assign)
        elif result.code in (Code.STALE_LEASE, Code.STALE):
            self.counts["discarded"] += 1
            log.info("group %d, lease %d: discarded, %s", assign.group, assign.lease, result.detail or result.code)
            self._drop_lease(assign)
        elif active is not None:
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
        return self._watch(asyncio.ensure_future(work))

    def _watch(self, task: "asyncio.Task[None]") -> "asyncio.Task[None]":
        """Cancel the task when the worker leaves, and end the worker if it fails."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """End the worker if a task fails; the producer reports its own errors through ``failure``."""
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, EngineError) and not self._end.done():
            self._end.set_exception(error)
