"""The producer behind a client: leases and weights wait here until the caller takes, loads and pushes."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from staleflow.clients.rollout.engines.base import Trajectory
from staleflow.clients.rollout.groups import ActiveLease, PartialGroup, Recipe
from staleflow.clients.rollout.samples import Lease, LoadedDuring
from staleflow.clients.rollout.session import GiveUp
from staleflow.clients.rollout.takeover import Takeover
from staleflow.clients.rollout.transfers import register, store
from staleflow.clients.weights import PulledVersion
from staleflow.configs.schema import Config
from staleflow.net.client import Client
from staleflow.net.errors import Refused, Unavailable
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version
from staleflow.protocols.consistency.limits import Bound
from staleflow.protocols.wire.messages import InstanceStats, Result
from staleflow.protocols.wire.trajectory import GroupPayload

log = logging.getLogger(__name__)

MOVE_RETRY_INTERVAL_S = 0.1
"""Time between two requests for a place at another worker."""


@dataclass(slots=True, eq=False)
class Offer:
    """A group that the caller wants to hand over in its current state."""

    group: PartialGroup
    end_s: float
    """End of the wait for a free place, in the event loop's time."""
    answer: "asyncio.Future[bool | Refused]"
    """True: the lease is over; False: the group stays; an error: it stays and can never leave in this state."""


@dataclass(slots=True, eq=False)
class OpenLease:
    """A lease that the caller has, or will take."""

    lease: Lease
    active: ActiveLease
    takeover: Takeover
    loaded: LoadedDuring
    outcome: "asyncio.Future[GroupPayload | Offer]"
    settled: "asyncio.Future[Result]"
    taken: bool = False


@dataclass(slots=True, eq=False)
class PendingLoad:
    """Weights that wait for the caller to load them."""

    weights: PulledVersion
    done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Caller:
    """The session's producer: waits for the caller to take, load and push."""

    def __init__(
        self, recipe: Recipe, config: Config, max_lease_s: float, scheduler: Client, shards: Sequence[Client]
    ) -> None:
        self._recipe = recipe
        self._scheduler = scheduler
        self._shards = shards
        self._max_lease_s = max_lease_s
        staleness = config.staleness
        self._bound = staleness.max_staleness if staleness.bound is Bound.TRAJECTORY else None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open: dict[LeaseId, OpenLease] = {}
        self.pending: PendingLoad | None = None
        self.loaded: tuple[Lineage, Version] = (Lineage(0), Version(-1))
        self.changed = asyncio.Event()
        """Set when there may be something to take."""
        self.numbers: InstanceStats | None = None
        self._generated = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0

    async def produce(
        self, active: ActiveLease, row: Mapping[str, Any], partial: PartialGroup | None
    ) -> GroupPayload | None:
        """Return the group that the caller pushes; None if another worker continues it.

        Samples of newer weights than the loaded ones start over, since versions never decrease in a sample.
        """
        loop, assign = asyncio.get_running_loop(), active.assign
        takeover = Takeover.none(assign.lease, self._recipe)
        if partial is not None and (partial.newest() or self.loaded) <= self.loaded:
            takeover = Takeover.of(partial, self._recipe)
        lease = Lease(
            group=assign.group,
            id=assign.lease,
            row=row,
            lineage=assign.lineage,
            min_version=assign.version,
            max_version=None if self._bound is None else Version(assign.version + self._bound),
            group_size=self._recipe.group_size,
            sampling=self._recipe.sampling,
            seeds=tuple(self._recipe.sample_seed(assign, n, takeover.origin) for n in takeover.chosen),
            prompt_ids=takeover.prompt_ids,
            samples=takeover.samples(),
            interrupted=active.interrupted,
        )
        loaded = LoadedDuring(prefixes=takeover.prefixes())
        one = OpenLease(lease, active, takeover, loaded, loop.create_future(), loop.create_future())
        if not self.open:
            self._busy_since_s = loop.time()
        self.open[lease.id] = one
        self.changed.set()
        try:
            payload = await self._payload(one, loop.time() + self._max_lease_s)
        except TimeoutError:
            detail = f"{lease} was neither pushed nor released within {self._max_lease_s:g} s (max_lease_s)"
            self._end(one, Result(code=Code.STALE_LEASE, detail=detail))
            raise GiveUp(detail) from None
        except GiveUp:
            self._end(one)
            raise
        except asyncio.CancelledError:
            self._end(one, Result(code=Code.STALE_LEASE, detail=f"the run took {lease} back"))
            raise
        if payload is None:
            self._end(one, Result(code=Code.STALE_LEASE, detail=f"another worker continues {lease}"))
            return None
        self._count(payload, [one.takeover.started[n] for n in one.takeover.chosen])
        return payload

    async def _payload(self, one: OpenLease, end_s: float) -> GroupPayload | None:
        """Return what the caller pushes; None once the group has moved. Raise ``TimeoutError`` at ``end_s``."""
        while True:
            async with asyncio.timeout_at(end_s):
                outcome = await one.outcome
            if not isinstance(outcome, Offer):
                return outcome
            one.outcome = asyncio.get_running_loop().create_future()
            if await self._moved(one, outcome):
                self._count(outcome.group.payload, one.takeover.started)
                return None

    async def _moved(self, one: OpenLease, made: Offer) -> bool:
        """Offer a group to the run; return True if its lease is over."""
        loop, assign, lease = asyncio.get_running_loop(), one.active.assign, one.lease
        answer: bool | Refused = False
        try:
            op = await store(assign, made.group, self._shards[assign.shard], any_target=True)
            result = await register(op, self._scheduler)
            while result.code is Code.BUSY and loop.time() < made.end_s and not lease.interrupted:
                await asyncio.sleep(MOVE_RETRY_INTERVAL_S)
                result = await register(op, self._scheduler)
            answer = result.code in (None, Code.STALE_LEASE)
            why = result.detail
        except (Refused, Unavailable) as no:
            why = str(no)
            if isinstance(no, Refused) and no.code not in (Code.BUSY, Code.STALE_LEASE):
                answer = Refused(no.code, f"{lease}: {no.detail}")
        if answer is not True:
            log.info("%s stays here: %s", lease, why)
            lease.used = lease.move_ordered = False
        if not made.answer.done():
            made.answer.set_result(answer)
        return answer is True

    def _count(self, payload: GroupPayload, taken_over: Sequence[Trajectory]) -> None:
        """Count the tokens that the caller generated."""
        self._generated += max(0, payload.num_tokens - sum(len(sample.token_ids) for sample in taken_over))

    def interrupt(self, active: ActiveLease) -> None:
        """Tell the caller to push soon."""
        active.interrupted = True
        if (one := self.open.get(active.assign.lease)) is not None:
            one.lease.interrupted = True
            one.lease.changed()

    def leave_group(self, active: ActiveLease) -> None:
        """Pass the order on: the tokens are at the caller. If it ignores the order, the group stays."""
        if (one := self.open.get(active.assign.lease)) is not None:
            one.lease.move_ordered = True
            one.lease.changed()

    def settled(self, active: ActiveLease, result: Result) -> None:
        """Pass the result of a push on to the caller."""
        if (one := self.open.get(active.assign.lease)) is not None:
            self._end(one, result)

    def close(self) -> None:
        """End the remaining leases."""
        for one in list(self.open.values()):
            self._end(one, Result(code=Code.STALE_LEASE, detail="the client was closed"))

    def _end(self, one: OpenLease, result: Result | None = None) -> None:
        self.open.pop(one.lease.id, None)
        if not self.open:
            self._busy_s += asyncio.get_running_loop().time() - self._busy_since_s
        one.lease.ended = True
        if result is not None and not one.settled.done():
            one.settled.set_result(result)
        one.lease.changed()

    def stats(self, fetching: int) -> InstanceStats:
        """Return the numbers that the caller reported, or those that follow from its leases."""
        if self.numbers is not None:
            return self.numbers
        taken = sum(one.taken for one in self.open.values())
        busy_s = self._busy_s
        if self.open:
            busy_s += asyncio.get_running_loop().time() - self._busy_since_s
        return InstanceStats(
            running=taken * self._recipe.group_size,
            waiting=(fetching + len(self.open) - taken) * self._recipe.group_size,
            generated_tokens=self._generated,
            tokens_per_s=self._generated / busy_s if busy_s else 0.0,
            busy_s=busy_s,
        )

    def stuck_s(self) -> float:
        """Return 0: ``max_lease_s`` limits a caller that hangs."""
        return 0.0

    async def load(self, lineage: Lineage, version: Version, weights: PulledVersion) -> None:
        """Wait until the caller has loaded the weights. Raise ``LoadError`` if it failed."""
        self.pending = pending = PendingLoad(weights)
        self.changed.set()
        try:
            await pending.done
        finally:
            self.pending = None
        self.loaded = (lineage, version)
        for one in self.open.values():
            one.loaded.loads.append(self.loaded)
