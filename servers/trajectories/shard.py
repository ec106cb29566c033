"""Life of a group inside a shard: incoming, registered, staged, occupied or released, forgotten.

- Bytes are durable before the scheduler is notified of them and before a worker gets an acknowledgement.
- A push that the scheduler rejects is forgotten immediately. Every other payload stays until ``Retention`` releases it
  or a newer lease of its group is registered.
- A group is queued for every stage whose needs are met, so independent stages run in parallel. The filter decides as
  soon as the rewards are durable; a filtered group skips the remaining stages.
- After a restart, the same steps run again from the stored state. Every step is idempotent.

Owns the store and the stage queues. No sockets in this module: callers pass callbacks and receive plain values.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from staleflow.configs.stages import Node
from staleflow.process.rate_limited_log import RateLimitedLog
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import (
    Op,
    RegisterMissing,
    RegisterOccupy,
    RegisterQuarantine,
    RegisterRelease,
    Result,
    TrajectoriesStatus,
)
from staleflow.protocols.wire.stages import REWARD, REWARD_COLUMN
from staleflow.protocols.wire.tensors import Array, unpack
from staleflow.servers.trajectories.filters import Filter
from staleflow.servers.trajectories.holdings import Holdings, Incoming, Phase, StoredGroup
from staleflow.servers.trajectories.records import Key, Pushed, register_push
from staleflow.servers.trajectories.registrar import NotDelivered, Registrar, Then
from staleflow.servers.trajectories.slabs import Slabs
from staleflow.servers.trajectories.stage_queue import StageQueue
from staleflow.servers.trajectories.store import Columns, CorruptRecord, Loaded, TrajectoryStore
from staleflow.store.base import FULL_SHARE, StoreFull
from staleflow.store.disk_errors import Resource, trouble

log = logging.getLogger(__name__)

RECOVER_AT_ONCE = 500
"""Maximum number of recovered groups in flight to the scheduler, and recovered before the loop runs other tasks. New
groups do not wait behind all recovered ones."""
RECOVER_WAIT_S = 1.0
"""Seconds to wait for the recovered groups in flight. Recovery continues after that even if the scheduler returns
``BUSY`` for some."""
RETRY_INTERVAL_S = 1.0
"""Retry interval of an operation whose message the scheduler rejected before the ledger saw it."""
MAX_DETAIL = 500
"""Maximum length of an error text of a stage function."""


class Shard:
    """State of one trajectory shard. ``stages`` are in topological order and include the reward stage."""

    def __init__(
        self, store: TrajectoryStore, registrar: Registrar, *, shard: int, stages: Sequence[Node], keep: Filter
    ) -> None:
        self.shard = shard
        self._store = store
        self._registrar = registrar
        self.stages = {node.name: node for node in stages}
        self._keep = keep
        # Random, so that no ticket of an earlier process is valid in this one.
        first = secrets.randbits(40) << 20
        self.queues = {stage: StageQueue(first) for stage in self.stages}
        self.on_queued: Callable[[str], None] = lambda stage: None
        """Called after a group was added to the queue of a stage."""
        self.now_s: Callable[[], float] = lambda: asyncio.get_running_loop().time()
        """Clock of the tickets and holds of stage workers."""
        self.holdings = Holdings()
        self._incoming: dict[Key, Incoming] = {}
        self._finished: list[tuple[Columns, int, Then]] = []
        self._deletes: list[Key] = []
        self._damaged: dict[Key, None] = {}
        """Stored but unreadable records, kept until the scheduler has dropped them or no longer needs them."""
        self._full: Resource = ""
        """Resource that was exhausted at the last push, or "" once something was deleted."""
        self._log_limit = RateLimitedLog()
        self._recovered = [self._add_loaded(loaded) for loaded in store.load()]

    def _add_loaded(self, loaded: Loaded) -> Loaded:
        """Add a stored payload at the start. A trainer may request it before ``recover`` processes it."""
        key, record, columns = loaded
        if record is None or any(stage not in self.stages for stage in columns):  # a stage was renamed or removed
            self._damaged[key] = None
            return loaded._replace(record=None)
        done = {stage: -1 for stage in self.stages if stage in columns}
        if record.rewards:
            done[REWARD] = -1
        self.holdings.add(StoredGroup(key, record, done=done))
        return loaded

    # Pushes ----------------------------------------------------------------------------------------------------------

    def room(self) -> bool:
        """Return False while pushes are rejected. The rest of the map is reserved for operations that finish work
        and free space."""
        incoming = sum(one.pushed.record.nbytes for one in self._incoming.values() if not one.pushed.record.slab)
        return self._store.used_share() + incoming / self._store.map_bytes < FULL_SHARE

    def full(self) -> Resource:
        """Return the exhausted resource that makes the shard reject pushes, or ""."""
        return self._full or ("" if self.room() else "map")

    def push(self, pushed: Pushed, then: Then) -> None:
        """Buffer a payload for the next commit.

        ``then`` is called once with the result: after the payload is durable and registered, or with the reason why it
        is not. ``CONFLICT`` if the lease was already pushed with other bytes, ``BUSY`` if another worker's push of the
        same lease is still being registered, ``OVERSIZE`` if the payload can never fit.
        """
        key, sha = pushed.key, pushed.record.sha
        stored, incoming = self.holdings.find(key), self._incoming.get(key)
        first = (
            stored.record if stored is not None else incoming.pushed.record if incoming is not None else pushed.record
        )
        if first.worker != pushed.record.worker and (stored is None or stored.phase is Phase.REGISTERING):
            detail = f"group {key.group}, lease {key.lease}, is also being pushed by {first.worker}"
            then(Result(code=Code.BUSY, detail=detail))
            return
        existing = (
            stored.record.sha if stored is not None else incoming.pushed.record.sha if incoming is not None else sha
        )
        if existing != sha:
            then(
                Result(
                    code=Code.CONFLICT,
                    detail=f"group {key.group}, lease {key.lease}, already has other bytes: {existing}",
                )
            )
        elif stored is not None:
            if stored.phase is Phase.REGISTERING:
                stored.waiting.append(then)
            else:
                then(Result())
        elif incoming is not None:
            incoming.waiting.append(then)
        elif pushed.record.nbytes > FULL_SHARE * self._store.map_bytes:
            then(
                Result(
                    code=Code.OVERSIZE,
                    detail=f"{pushed.record.nbytes} bytes can never fit; increase trajectories.map_mb",
                )
            )
        else:
            self._incoming[key] = Incoming(pushed, [then])
            if self.slabs is not None and pushed.record.slab:
                self.slabs.expect(pushed.record.slab)

    def commit(self) -> None:
        """Commit deletions, stage columns and pushes since the last call, then notify the scheduler.

        Deletions come first: they free the room that the other two need.
        """
        self._commit_deletes()
        self._commit_columns()
        self._commit_pushes()

    def _commit_pushes(self) -> None:
        if not self._incoming:
            return
        incoming, self._incoming = list(self._incoming.values()), {}
        named = [one.pushed.record.slab for one in incoming if one.pushed.record.slab]
        late = {*self._deletes}
        full = [one for one in incoming if one.pushed.key in late]  # its stored record must be deleted first
        incoming = [one for one in incoming if one.pushed.key not in late]
        if not self._write(incoming):  # all or none: if not all fit, try each on its own
            self._store.turn_over()
            more = [one for one in incoming if len(incoming) == 1 or not self._write([one])]
            incoming = [one for one in incoming if one not in more]
            full += more
        for one in full:
            _resolve(
                one.waiting, Result(code=Code.BUSY, detail=f"the trajectory server's {trouble(self._full or 'map')}")
            )
        if self.slabs is not None:
            for name in named:
                self.slabs.settle(name)
        for one in incoming:
            self._damaged.pop(one.pushed.key, None)
            stored = StoredGroup(one.pushed.key, one.pushed.record, waiting=one.waiting)
            if (reward := stored.record.reward) is not None:
                stored.done[REWARD] = -1
                self._judge(stored, {REWARD_COLUMN: reward})
            self.holdings.add(stored)
            self._register(stored, new=True)

    def _write(self, incoming: Sequence[Incoming]) -> bool:
        if not incoming:
            return True
        try:
            records = self._store.write_pushes([one.pushed for one in incoming], instead_of=self._damaged)
        except StoreFull as error:
            log.log(logging.DEBUG if self._full else logging.ERROR, "pushes rejected: %s", error)
            self._full = error.resource
            return False
        for one, record in zip(incoming, records, strict=True):
            one.pushed = one.pushed._replace(record=record)
        self._full = ""
        return True

    def _register(self, stored: StoredGroup, *, new: bool = False) -> None:
        """Register a durable push with the scheduler. ``new``: the push has not been acknowledged to its worker yet."""
        ready = stored.keep is True and self.is_whole(stored)

        def then(result: Result) -> None:
            waiting, stored.waiting = stored.waiting, []
            # A recovered push may have been acknowledged, so it is kept until the ledger decides. The worker of a new
            # one gets the refusal and pushes again.
            if isinstance(result, NotDelivered) and not new:
                asyncio.get_running_loop().call_later(RETRY_INTERVAL_S, self._register_again, stored)
            elif result.code is not None:
                self.forget(stored.key)
            else:
                self._store.reach(self._store.reached.run, stored.key.lease)
                self._forget_older(stored.key)
                if ready:
                    stored.phase = Phase.SETTLED
                else:
                    self._advance(stored)
            _resolve(waiting, result)

        reward = stored.reward if ready else None
        register = register_push(stored.key, stored.record, self.shard, occupies=ready, reward=reward)
        self._registrar.add(register, then)

    def _register_again(self, stored: StoredGroup) -> None:
        if self.holdings.find(stored.key) is stored:
            self._register(stored)

    def _forget_older(self, key: Key) -> None:
        """Forget older leases of the same group: only the newest registered lease can still be trained."""
        for older in self.holdings.older(key):
            if older.resting:
                self.forget(older.key)

    # Stages ----------------------------------------------------------------------------------------------------------

    def _next_stages(self, stored: StoredGroup) -> None:
        """Queue the group for every stage whose needs are met and that has not been queued yet."""
        stored.phase = Phase.STAGING
        for stage, node in self.stages.items():
            queued = stage in stored.done or stage in stored.queued
            if not queued and all(needed in stored.done for needed in node.after):
                stored.queued.add(stage)
                self.queues[stage].add(stored.key)
                self.on_queued(stage)

    def finish(self, columns: Columns, ticket: int, worker: str, then: Then) -> None:
        """Accept the columns that a stage computed for a group.

        ``then`` is called once the columns are durable, or with ``STALE_LEASE`` if the ticket has expired. A repeated
        result of the finished ticket is acknowledged again.
        """
        key, stage = columns.key, columns.stage
        stored = self.holdings.find(key)
        if stored is not None and stored.done.get(stage) == ticket:
            then(Result())
        elif stored is None or not self.queues[stage].finish(key, ticket, worker):
            then(_ticket_expired(key))
        else:
            self._finished.append((columns, ticket, then))

    def fail(self, key: Key, stage: str, ticket: int, worker: str, why: str) -> Result:
        """Record that a worker failed a group. It is retried, by another worker first, or given up for good."""
        if self.holdings.find(key) is None:
            return _ticket_expired(key)
        given_up = self.queues[stage].fail(key, ticket, worker, why[:MAX_DETAIL], now_s=self.now_s())
        if given_up is None:
            return _ticket_expired(key)
        if given_up:
            self.give_up([key], f"{stage}: {why}"[:MAX_DETAIL])
        else:
            self.on_queued(stage)
        return Result()

    def give_up(self, keys: Sequence[Key], detail: str) -> None:
        """Release groups that a stage has failed for good."""
        for key in keys:
            if (stored := self.holdings.find(key)) is not None and stored.phase is Phase.STAGING:
                if (more := self._log_limit.due()) is not None:
                    log.error("group %d released: %s%s", key.group, detail, more)
                self._release(stored, ReleaseWhy.ABORTED, detail)

    def _commit_columns(self) -> None:
        if not self._finished:
            return
        finished, self._finished = self._finished, []
        try:
            self._store.write_columns([columns for columns, _, _ in finished])
        except StoreFull as error:
            if (more := self._log_limit.due()) is not None:
                log.warning("stage results discarded, their groups requeued: %s%s", error, more)
            self._put_back(finished, error.resource)
            return
        for columns, ticket, then in finished:
            stored = self.holdings.find(columns.key)
            if stored is not None and stored.phase is Phase.STAGING:  # else released by another stage
                stored.done[columns.stage] = ticket
                if columns.stage == REWARD:
                    self._judge(stored, columns.arrays)
                self._advance(stored)
            then(Result())

    def _put_back(self, finished: Sequence[tuple[Columns, int, Then]], full: Resource) -> None:
        """Requeue groups whose stage results could not be stored for lack of room."""
        for columns, _, then in finished:
            stored = self.holdings.find(columns.key)
            if stored is not None and stored.phase is Phase.STAGING:
                stored.queued.discard(columns.stage)
                self._next_stages(stored)
            then(Result(code=Code.BUSY, detail=f"the trajectory server's {trouble(full)}"))

    def _advance(self, stored: StoredGroup) -> None:
        """Release the group if the filter rejects it; else queue its next stages; after the last one, occupy it."""
        if stored.keep is False:
            self._release(stored, ReleaseWhy.FILTERED, "")
        elif stored.keep is None or not self.is_whole(stored):
            self._next_stages(stored)
        else:
            occupy = RegisterOccupy(group=stored.key.group, lease=stored.key.lease, reward=stored.reward)
            self._close(stored, occupy)

    def _judge(self, stored: StoredGroup, rewards: Mapping[str, Array]) -> None:
        """Apply the filter to the columns of the reward stage."""
        stored.keep, stored.reward = self._keep(rewards), float(rewards[REWARD_COLUMN].mean())

    def _release(self, stored: StoredGroup, why: ReleaseWhy, detail: str) -> None:
        for queue in self.queues.values():
            queue.forget(stored.key)
        group, lease = stored.key
        release = RegisterRelease(group=group, lease=lease, why=why, detail=detail, reward=stored.reward)
        self._close(stored, release, forget=True)

    def _close(self, stored: StoredGroup, op: Op, *, forget: bool = False) -> None:
        stored.phase = Phase.CLOSING

        def then(result: Result) -> None:
            if (forget and result.code is None) or result.code is Code.STALE_LEASE:  # no trainer can request it
                self.forget(stored.key)
                return
            stored.phase = Phase.SETTLED
            if isinstance(result, NotDelivered):
                asyncio.get_running_loop().call_later(RETRY_INTERVAL_S, retry)
            elif result.code is not None:
                log.info("group %d, lease %d: %s %s", *stored.key, result.code, result.detail)

        def retry() -> None:
            if self.holdings.find(stored.key) is stored:
                self._close(stored, op, forget=forget)

        self._registrar.add(op, then)

    # Reading ---------------------------------------------------------------------------------------------------------

    def num_passed(self, stage: str) -> int:
        """Return how many groups have finished this stage but not all stages."""
        return sum(stage in stored.done for stored in self.holdings if stored.phase is not Phase.SETTLED)

    def is_whole(self, stored: StoredGroup) -> bool:
        """Return True if every stage is done with the group."""
        return len(stored.done) == len(self.stages)

    def read_columns(self, wanted: Sequence[StoredGroup]) -> list[dict[str, Array]]:
        """Return the stage columns of each group, also before ``recover`` has processed it. Raise ``CorruptRecord``."""
        return self._store.columns([(stored.key, stored.record, stored.done) for stored in wanted], self.stages)

    @property
    def slabs(self) -> Slabs | None:
        """Slabs that workers on this host write into; None if the shard has none."""
        return self._store.slabs

    @property
    def map_bytes(self) -> int:
        """Size of the map in bytes: the maximum payload that the shard stores."""
        return self._store.map_bytes

    def slab_room(self) -> int:
        """Return the bytes available for another slab."""
        return self._store.slab_room()

    def view_payload(self, stored: StoredGroup) -> memoryview:
        """Return the packed payload for a reader that checks it. Raise ``CorruptRecord`` if it is missing."""
        return self._store.view_payload(stored.key, stored.record)

    def read_payload(self, stored: StoredGroup) -> bytes:
        """Return a copy of the packed payload, to be checked with ``unpack_verified``. Raise ``CorruptRecord``."""
        return self._store.payload(stored.key, stored.record)

    async def quarantine(self, corrupt: CorruptRecord) -> None:
        """Report damaged bytes to the scheduler and wait for its acknowledgement.

        Returning only then means that a reader that requests the batch again gets the new members.
        """
        stored, acked = self.holdings.find(corrupt.key), asyncio.Event()
        if stored is None or not stored.resting:
            return
        log.error("quarantined: %s", corrupt)
        for queue in self.queues.values():
            queue.forget(stored.key)
        stored.phase = Phase.CLOSING

        def then(_: Result) -> None:
            stored.phase = Phase.SETTLED
            acked.set()

        self._give_up_damaged(stored.key, str(corrupt), then)
        await acked.wait()

    async def missing(self, group: GroupId, sha: str) -> bool:
        """Report bytes that are not here and wait for the acknowledgement. Return True if the run counted on them.

        Their record is unreadable, was lost with its disk, or was replaced by another push.
        """
        acked: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def then(result: Result) -> None:
            if not acked.done():  # the caller may have been cancelled
                acked.set_result(result)

        self._registrar.add(RegisterMissing(group=group, shard=self.shard, sha=sha), then)
        return (await acked).code is None

    def _give_up_record(self, key: Key) -> None:
        """Give up a record that cannot be read.

        It is deleted once no trainer can request it. Until then, requests for it return ``CorruptRecord`` rather than
        nothing.
        """

        def given_up(result: Result) -> None:
            if result.code in (None, Code.STALE_LEASE) and key in self._damaged:
                del self._damaged[key]
                self._deletes.append(key)

        self._give_up_damaged(key, "its record is damaged", given_up)

    def _give_up_damaged(self, key: Key, detail: str, then: Then) -> None:
        """Release the group if it is not occupied yet, else quarantine it; do nothing if another lease owns the group.

        ``then`` gets ``STALE`` if the group is consumed: a rollback may bring it back.
        """

        def released(result: Result) -> None:
            if result.code is Code.STALE:
                self._registrar.add(RegisterQuarantine(group=key.group), then)
            else:
                then(result)

        release = RegisterRelease(group=key.group, lease=key.lease, why=ReleaseWhy.ABORTED, detail=detail)
        self._registrar.add(release, released)

    # Forgetting and recovering ---------------------------------------------------------------------------------------

    def forget(self, key: Key) -> None:
        """Remove a payload from the queues now and from the store with the next commit."""
        if self.holdings.remove(key):
            self._deletes.append(key)
        for queue in self.queues.values():
            queue.forget(key)

    def _commit_deletes(self) -> None:
        if not self._deletes:
            return
        deletes, self._deletes = self._deletes, []
        most = len(deletes)
        while deletes:
            try:
                self._store.delete(deletes[:most])
            except StoreFull as error:  # LMDB copies the pages it changes: deleting needs room, too
                if most == 1 or error.resource in ("read-only", "failing"):
                    if (more := self._log_limit.due()) is not None:
                        log.warning("deletions postponed: %s%s", error, more)
                    break
                most = (most + 3) // 4
                self._store.turn_over()
            else:
                del deletes[:most]
                self._full = ""
        self._deletes = deletes + self._deletes

    def retainable(self) -> list[Key]:
        """Return the keys to submit to ``Retention``: those without an operation in flight to the scheduler."""
        return [*(stored.key for stored in self.holdings if stored.resting), *self._damaged]

    def retain(self, asked: Sequence[Key], keep: set[GroupId]) -> int:
        """Forget those of ``asked`` that need not be kept, unless their state has changed since; return how many."""
        candidates = [self.holdings.find(key) for key in asked if key.group not in keep]
        unneeded = [stored.key for stored in candidates if stored is not None and stored.resting]
        for key in unneeded:
            self.forget(key)
        for key in [key for key in asked if key in self._damaged and key.group not in keep]:
            del self._damaged[key]
            self._deletes.append(key)
        return len(unneeded)

    async def recover(self) -> None:
        """Resume every stored group where the previous process stopped. Call it once, after the scheduler has
        attached this shard."""
        recovered, self._recovered = self._recovered, []
        for number, (key, record, columns) in enumerate(recovered):
            if number % RECOVER_AT_ONCE == RECOVER_AT_ONCE - 1:
                await asyncio.sleep(0)
                with suppress(TimeoutError):
                    async with asyncio.timeout(RECOVER_WAIT_S):
                        await self._registrar.wait_below(RECOVER_AT_ONCE)
            stored = self.holdings.find(key)
            if stored is None and record is None:
                log.error("group %d, lease %d quarantined: its record is damaged", *key)
                self._give_up_record(key)
            if stored is None or record is None:  # forgotten, or pushed again in the meantime
                continue
            if REWARD in stored.done:
                reward = stored.record.reward
                rewards = unpack(columns[REWARD]) if reward is None else {REWARD_COLUMN: reward}
                self._judge(stored, rewards)
            if self.is_whole(stored) and not stored.record.rewards:
                waiting, stored.waiting = stored.waiting, []
                _resolve(waiting, Result())  # it has been through the stages, so its push was registered
                self._advance(stored)
            else:
                self._register(stored)
        if recovered:
            log.info("%d groups recovered", len(recovered))

    def used_share(self) -> float:
        """Return the share of the map in use, 0 to 1."""
        return self._store.used_share()

    def status(self, *, rows: int, partials: int) -> TrajectoriesStatus:
        """Return the status of the server, which has ``rows`` prompts and the samples of ``partials`` groups."""
        return TrajectoriesStatus(
            shard=self.shard,
            groups=dict(Counter(stored.phase.name.lower() for stored in self.holdings)),
            used_share=self.used_share(),
            full=self.full(),
            slabs=self.slabs.counts() if self.slabs is not None else {},
            queues={stage: {"waiting": len(q), "taken": q.taken} for stage, q in self.queues.items()},
            unregistered=len(self._registrar),
            rows=rows,
            partials=partials,
        )


def _resolve(waiting: Sequence[Then], result: Result) -> None:
    for then in waiting:
        then(result)


def _ticket_expired(key: Key) -> Result:
    return Result(code=Code.STALE_LEASE, detail=f"group {key.group}: this ticket has expired")
