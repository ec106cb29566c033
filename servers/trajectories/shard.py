"""The life of a group inside a shard: incoming, registered, through the stages, occupied or released, forgotten.

- Nothing is said to the scheduler, and nothing answered to a worker, of bytes that are not durable.
- A push that the scheduler refuses is forgotten at once; anything else goes when ``Retention`` says so, or when a newer
  lease of its group was pushed.
- A group is in every stage at once whose needs are there. The filter judges it as soon as its rewards are durable: what
  it does not want goes through no stage that is still to come.
- After a restart the same steps are taken again from what is stored: every one of them is idempotent.

Owns the store and the stage queues. No sockets here: callers hand in callbacks and get plain values.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

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
)
from staleflow.protocols.wire.stages import REWARD, REWARD_COLUMN
from staleflow.protocols.wire.tensors import Array, unpack
from staleflow.servers.trajectories.filters import Filter
from staleflow.servers.trajectories.holdings import Held, Holdings, Incoming, Phase
from staleflow.servers.trajectories.records import Key, Pushed, register_push
from staleflow.servers.trajectories.registrar import Registrar, Then, Untold
from staleflow.servers.trajectories.slabs import Slabs
from staleflow.servers.trajectories.stage_queue import StageQueue
from staleflow.servers.trajectories.store import Columns, CorruptRecord, Loaded, TrajectoryStore
from staleflow.store.base import FULL_SHARE, StoreFull
from staleflow.store.disk_errors import Resource, trouble

log = logging.getLogger(__name__)

RECOVER_AT_ONCE = 500
"""Groups taken up again before the loop has its turn, and on the way to the scheduler: new ones do not wait behind all
the old ones."""
RECOVER_WAIT_S = 1.0
"""A scheduler that answers some of these with busy for longer does not keep the others waiting."""
RETRY_INTERVAL_S = 1.0
"""A push that the ledger was not asked for, since it hears nothing from here at present, is told again after this."""
MAX_DETAIL = 500
"""Characters of what a stage's function said."""


class Shard:
    """Everything that one trajectory server holds. ``stages``: each after what it waits for; one is the reward."""

    def __init__(
        self, store: TrajectoryStore, registrar: Registrar, *, shard: int, stages: Sequence[Node], keep: Filter
    ) -> None:
        self.shard = shard
        self._store = store
        self._registrar = registrar
        self.stages = {node.name: node for node in stages}
        self._keep = keep
        first = secrets.randbits(40) << 20
        self.queues = {stage: StageQueue(first) for stage in self.stages}
        self.on_queued: Callable[[str], None] = lambda stage: None
        """Called when a group was added to the queue of a stage."""
        self.now_s: Callable[[], float] = lambda: asyncio.get_running_loop().time()
        """The time that tickets and holds of stage workers go by."""
        self.holdings = Holdings()
        self._incoming: dict[Key, Incoming] = {}
        self._finished: list[tuple[Columns, int, Then]] = []
        self._deletes: list[Key] = []
        self._damaged: dict[Key, None] = {}
        """Stored, but not to be read: kept until the scheduler has dropped them, or needs them no more."""
        self._full: Resource = ""
        """What had no room for the last push, unless something has gone since."""
        self._said = RateLimitedLog()
        self._recovered = [self._found(loaded) for loaded in store.load()]

    def _found(self, loaded: Loaded) -> Loaded:
        """What the start found: a trainer may ask for it before it is taken up."""
        key, record, columns = loaded
        if record is None or any(stage not in self.stages for stage in columns):  # a name that has changed
            self._damaged[key] = None
            return loaded._replace(record=None)
        done = {stage: -1 for stage in self.stages if stage in columns}
        if record.rewards:
            done[REWARD] = -1
        self.holdings.add(Held(key, record, done=done))
        return loaded

    # Pushes ----------------------------------------------------------------------------------------------------------

    def room(self) -> bool:
        """False while pushes are refused: what is left of the map is for what ends work."""
        incoming = sum(one.pushed.record.nbytes for one in self._incoming.values() if not one.pushed.record.slab)
        return self._store.used_share() + incoming / self._store.map_bytes < FULL_SHARE

    def full(self) -> Resource:
        """What has no room, so that pushes are refused."""
        return self._full or ("" if self.room() else "map")

    def push(self, pushed: Pushed, then: Then) -> None:
        """Take a payload in; ``then`` is told once it is durable and registered, or why it is not."""
        key, sha = pushed.key, pushed.record.sha
        held, incoming = self.holdings.find(key), self._incoming.get(key)
        first = held.record if held is not None else incoming.pushed.record if incoming is not None else pushed.record
        if first.worker != pushed.record.worker and (held is None or held.phase is Phase.REGISTERING):
            detail = f"group {key.group}, lease {key.lease}, comes from {first.worker}, too"
            then(Result(code=Code.BUSY, detail=detail))
            return
        known = held.record.sha if held is not None else incoming.pushed.record.sha if incoming is not None else sha
        if known != sha:
            then(Result(code=Code.CONFLICT, detail=f"group {key.group}, lease {key.lease}, has other bytes: {known}"))
        elif held is not None:
            if held.phase is Phase.REGISTERING:
                held.waiting.append(then)
            else:
                then(Result())
        elif incoming is not None:
            incoming.waiting.append(then)
        elif pushed.record.nbytes > FULL_SHARE * self._store.map_bytes:
            then(Result(code=Code.OVERSIZE, detail=f"{pushed.record.nbytes} bytes never fit trajectories.map_mb"))
        else:
            self._incoming[key] = Incoming(pushed, [then])
            if self.slabs is not None and pushed.record.slab:
                self.slabs.expect(pushed.record.slab)

    def commit(self) -> None:
        """Make durable what came since the last time, then tell the scheduler."""
        self._commit_deletes()
        self._commit_columns()
        self._commit_pushes()

    def _commit_pushes(self) -> None:
        if not self._incoming:
            return
        incoming, self._incoming = list(self._incoming.values()), {}
        named = [one.pushed.record.slab for one in incoming if one.pushed.record.slab]
        late = {*self._deletes}
        full = [one for one in incoming if one.pushed.key in late]  # what is stored of it has to go first
        incoming = [one for one in incoming if one.pushed.key not in late]
        if not self._stored(incoming):
            self._store.turn_over()
            more = [one for one in incoming if len(incoming) == 1 or not self._stored([one])]
            incoming = [one for one in incoming if one not in more]
            full += more
        for one in full:
            _tell(one.waiting, Result(code=Code.BUSY, detail=f"the trajectory server's {trouble(self._full or 'map')}"))
        if self.slabs is not None:
            for name in named:
                self.slabs.settle(name)
        for one in incoming:
            self._damaged.pop(one.pushed.key, None)
            held = Held(one.pushed.key, one.pushed.record, waiting=one.waiting)
            if (reward := held.record.reward) is not None:
                held.done[REWARD], held.keep = -1, self._keep({REWARD_COLUMN: reward})
            self.holdings.add(held)
            self._register(held, new=True)

    def _stored(self, incoming: Sequence[Incoming]) -> bool:
        if not incoming:
            return True
        try:
            records = self._store.write_pushes([one.pushed for one in incoming], instead_of=self._damaged)
        except StoreFull as error:
            log.log(logging.DEBUG if self._full else logging.ERROR, "pushes are refused: %s", error)
            self._full = error.resource
            return False
        for one, record in zip(incoming, records, strict=True):
            one.pushed = one.pushed._replace(record=record)
        self._full = ""
        return True

    def _register(self, held: Held, *, new: bool = False) -> None:
        """``new``: nobody was ever told yes."""
        ready = held.keep is True and self.is_whole(held)

        def then(result: Result) -> None:
            waiting, held.waiting = held.waiting, []
            if isinstance(result, Untold) and not new:
                asyncio.get_running_loop().call_later(RETRY_INTERVAL_S, self._register_again, held)
            elif result.code is not None:
                self.forget(held.key)
            else:
                self._store.reach(self._store.reached.run, held.key.lease)
                self._forget_older(held.key)
                if ready:
                    held.phase = Phase.SETTLED
                else:
                    self._advance(held)
            _tell(waiting, result)

        self._registrar.add(register_push(held.key, held.record, self.shard, occupies=ready), then)

    def _register_again(self, held: Held) -> None:
        if self.holdings.find(held.key) is held:
            self._register(held)

    def _forget_older(self, key: Key) -> None:
        """Only the newest registered lease of a group can still train."""
        for older in self.holdings.older(key):
            if older.resting:
                self.forget(older.key)

    # Stages ----------------------------------------------------------------------------------------------------------

    def _next_stages(self, held: Held) -> None:
        """Queue the group for every stage that has what it needs and has not been asked yet."""
        held.phase = Phase.STAGING
        for stage, node in self.stages.items():
            asked = stage in held.done or stage in held.queued
            if not asked and all(needed in held.done for needed in node.after):
                held.queued.add(stage)
                self.queues[stage].add(held.key)
                self.on_queued(stage)

    def finish(self, columns: Columns, ticket: int, worker: str, then: Then) -> None:
        """A stage is done with a group; ``then`` is told once its columns are durable, or that the ticket is over."""
        key, stage = columns.key, columns.stage
        held = self.holdings.find(key)
        if held is not None and held.done.get(stage) == ticket:
            then(Result())
        elif held is None or not self.queues[stage].finish(key, ticket, worker):
            then(_ticket_is_over(key))
        else:
            self._finished.append((columns, ticket, then))

    def fail(self, key: Key, stage: str, ticket: int, worker: str, why: str) -> Result:
        """A worker has nothing for a group: it is tried again, elsewhere first, or given up for good."""
        if self.holdings.find(key) is None:
            return _ticket_is_over(key)
        given_up = self.queues[stage].fail(key, ticket, worker, why[:MAX_DETAIL], now_s=self.now_s())
        if given_up is None:
            return _ticket_is_over(key)
        if given_up:
            self.give_up([key], f"{stage}: {why}"[:MAX_DETAIL])
        else:
            self.on_queued(stage)
        return Result()

    def give_up(self, keys: Sequence[Key], detail: str) -> None:
        """A stage failed for good: these groups are released."""
        for key in keys:
            if (held := self.holdings.find(key)) is not None and held.phase is Phase.STAGING:
                if (more := self._said.due()) is not None:
                    log.error("group %d is given up: %s%s", key.group, detail, more)
                self._release(held, ReleaseWhy.ABORTED, detail)

    def _commit_columns(self) -> None:
        if not self._finished:
            return
        finished, self._finished = self._finished, []
        try:
            self._store.write_columns([columns for columns, _, _ in finished])
        except StoreFull as error:
            if (more := self._said.due()) is not None:
                log.warning("stage results are put back: %s%s", error, more)
            self._put_back(finished, error.resource)
            return
        for columns, ticket, then in finished:
            held = self.holdings.find(columns.key)
            if held is not None and held.phase is Phase.STAGING:  # another stage may have ended it meanwhile
                held.done[columns.stage] = ticket
                if columns.stage == REWARD:
                    held.keep = self._keep(columns.arrays)
                self._advance(held)
            then(Result())

    def _put_back(self, finished: Sequence[tuple[Columns, int, Then]], full: Resource) -> None:
        """There was no room for these: their stage is done again later."""
        for columns, _, then in finished:
            held = self.holdings.find(columns.key)
            if held is not None and held.phase is Phase.STAGING:
                held.queued.discard(columns.stage)
                self._next_stages(held)
            then(Result(code=Code.BUSY, detail=f"the trajectory server's {trouble(full)}"))

    def _advance(self, held: Held) -> None:
        """Out, if the filter has seen it and does not want it; else to the next stages; after the last, occupied."""
        if held.keep is False:
            self._release(held, ReleaseWhy.FILTERED, "")
        elif held.keep is None or not self.is_whole(held):
            self._next_stages(held)
        else:
            self._close(held, RegisterOccupy(group=held.key.group, lease=held.key.lease))

    def _release(self, held: Held, why: ReleaseWhy, detail: str) -> None:
        for queue in self.queues.values():
            queue.forget(held.key)
        release = RegisterRelease(group=held.key.group, lease=held.key.lease, why=why, detail=detail)
        self._close(held, release, forget=True)

    def _close(self, held: Held, op: Op, *, forget: bool = False) -> None:
        held.phase = Phase.CLOSING

        def then(result: Result) -> None:
            if (forget and result.code is None) or result.code is Code.STALE_LEASE:  # no trainer will ask for it
                self.forget(held.key)
                return
            held.phase = Phase.SETTLED
            if isinstance(result, Untold):
                asyncio.get_running_loop().call_later(RETRY_INTERVAL_S, again)
            elif result.code is not None:
                log.info("group %d, lease %d: %s %s", *held.key, result.code, result.detail)

        def again() -> None:
            if self.holdings.find(held.key) is held:
                self._close(held, op, forget=forget)

        self._registrar.add(op, then)

    # Reading ---------------------------------------------------------------------------------------------------------

    def num_passed(self, stage: str) -> int:
        """Return how many groups are done with a stage and not with all of them."""
        return sum(stage in held.done for held in self.holdings if held.phase is not Phase.SETTLED)

    def is_whole(self, held: Held) -> bool:
        """Whether every stage is done with it."""
        return len(held.done) == len(self.stages)

    def read_columns(self, wanted: Sequence[Held]) -> list[dict[str, Array]]:
        """Stage columns of each, those included that ``recover`` has still to find. ``CorruptRecord``."""
        return self._store.columns([(held.key, held.record, held.done) for held in wanted], self.stages)

    @property
    def slabs(self) -> Slabs | None:
        """Where workers of this host write; None: nowhere."""
        return self._store.slabs

    @property
    def map_bytes(self) -> int:
        """Of the payload that may be held."""
        return self._store.map_bytes

    def slab_room(self) -> int:
        """Bytes that another slab may take."""
        return self._store.slab_room()

    def stored(self, held: Held) -> memoryview:
        """Packed payload, for a reader that checks it. ``CorruptRecord`` where there is none."""
        return self._store.stored(held.key, held.record)

    def read_payload(self, held: Held) -> bytes:
        """Packed payload, to be checked with ``unpacked``. ``CorruptRecord``."""
        return self._store.payload(held.key, held.record)

    async def quarantine(self, corrupt: CorruptRecord) -> None:
        """Name damaged bytes to the scheduler; returns once it knows, so that what is asked next is the new truth."""
        held, told = self.holdings.find(corrupt.key), asyncio.Event()
        if held is None or not held.resting:
            return
        log.error("quarantined: %s", corrupt)
        for queue in self.queues.values():
            queue.forget(held.key)
        held.phase = Phase.CLOSING

        def then(_: Result) -> None:
            held.phase = Phase.SETTLED
            told.set()

        self._give_up_damaged(held.key, str(corrupt), then)
        await told.wait()

    async def missing(self, group: GroupId, sha: str) -> bool:
        """As ``quarantine``, for bytes that are not here: their record cannot be read, or was lost with its disk, or
        another push has taken its place. Says whether the run counted on them."""
        told: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def then(result: Result) -> None:
            if not told.done():  # who asked may have gone
                told.set_result(result)

        self._registrar.add(RegisterMissing(group=group, shard=self.shard, sha=sha), then)
        return (await told).code is None

    def _give_up_record(self, key: Key) -> None:
        """Forgotten once no trainer can ask for it any more; until then, damage is what it is asked for."""

        def given_up(result: Result) -> None:
            if result.code in (None, Code.STALE_LEASE) and key in self._damaged:
                del self._damaged[key]
                self._deletes.append(key)

        self._give_up_damaged(key, "its record is damaged", given_up)

    def _give_up_damaged(self, key: Key, detail: str, then: Then) -> None:
        """Released if it is not occupied yet, else quarantined; nothing if another lease has the group now. ``then``
        is told ``stale`` when it is consumed, and may come back."""

        def released(result: Result) -> None:
            if result.code is Code.STALE:
                self._registrar.add(RegisterQuarantine(group=key.group), then)
            else:
                then(result)

        release = RegisterRelease(group=key.group, lease=key.lease, why=ReleaseWhy.ABORTED, detail=detail)
        self._registrar.add(release, released)

    # Forgetting and recovering ---------------------------------------------------------------------------------------

    def forget(self, key: Key) -> None:
        """A payload that nobody needs: out of the queues now, out of the store with the next commit."""
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
            except StoreFull as error:  # deleting takes some room too; a few at a time take little
                if most == 1 or error.resource in ("read-only", "failing"):
                    if (more := self._said.due()) is not None:
                        log.warning("deletes are put off: %s%s", error, more)
                    break
                most = (most + 3) // 4
                self._store.turn_over()
            else:
                del deletes[:most]
                self._full = ""
        self._deletes = deletes + self._deletes

    def retainable(self) -> list[Key]:
        """What ``Retention`` is asked about: nothing of it is on the way to the scheduler."""
        return [*(held.key for held in self.holdings if held.resting), *self._damaged]

    def retain(self, asked: Sequence[Key], keep: set[GroupId]) -> int:
        """Forget those of ``asked`` that need not be kept, unless they went on meanwhile; return how many."""
        found = [self.holdings.find(key) for key in asked if key.group not in keep]
        gone = [held.key for held in found if held is not None and held.resting]
        for key in gone:
            self.forget(key)
        for key in [key for key in asked if key in self._damaged and key.group not in keep]:
            del self._damaged[key]
            self._deletes.append(key)
        return len(gone)

    async def recover(self) -> None:
        """Take up every stored group where the last process left it. Once, when the scheduler knows this shard."""
        recovered, self._recovered = self._recovered, []
        for number, (key, record, columns) in enumerate(recovered):
            if number % RECOVER_AT_ONCE == RECOVER_AT_ONCE - 1:
                await asyncio.sleep(0)
                with suppress(TimeoutError):
                    async with asyncio.timeout(RECOVER_WAIT_S):
                        await self._registrar.fewer(RECOVER_AT_ONCE)
            held = self.holdings.find(key)
            if held is None and record is None:
                log.error("group %d, lease %d: its record is damaged; it is quarantined", *key)
                self._give_up_record(key)
            if held is None or record is None:  # gone, or pushed anew meanwhile
                continue
            if REWARD in held.done:
                reward = held.record.reward
                made = unpack(columns[REWARD]) if reward is None else {REWARD_COLUMN: reward}
                held.keep = self._keep(made)
            if self.is_whole(held) and not held.record.rewards:
                waiting, held.waiting = held.waiting, []
                _tell(waiting, Result())  # the stages had it, so its push was registered
                self._advance(held)
            else:
                self._register(held)
        if recovered:
            log.info("%d groups recovered", len(recovered))

    def used_share(self) -> float:
        """Of the map."""
        return self._store.used_share()

    def status(self) -> dict[str, Any]:
        """Counts."""
        phases = Counter(held.phase.name.lower() for held in self.holdings)
        return {
            "shard": self.shard,
            "groups": dict(phases),
            "used_share": self.used_share(),
            "full": self.full(),
            "slabs": self.slabs.counts() if self.slabs is not None else {},
            "queues": {stage: {"waiting": len(q), "taken": q.taken} for stage, q in self.queues.items()},
            "unregistered": len(self._registrar),
        }


def _tell(waiting: Sequence[Then], result: Result) -> None:
    for then in waiting:
        then(result)


def _ticket_is_over(key: Key) -> Result:
    return Result(code=Code.STALE_LEASE, detail=f"group {key.group}: this ticket is over")
