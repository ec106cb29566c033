"""The producer behind a client: leases and weights wait here until the caller takes, loads and pushes."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from staleflow.clients.rollout.groups import ActiveLease, PartialGroup, Recipe
from staleflow.clients.rollout.samples import Lease, LoadedDuring
from staleflow.clients.rollout.session import GiveUp
from staleflow.clients.weights import PulledVersion
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version
from staleflow.protocols.consistency.limits import Bound
from staleflow.protocols.wire.messages import InstanceStats, Result
from staleflow.protocols.wire.trajectory import GroupPayload


@dataclass(slots=True, eq=False)
class OpenLease:
    """A lease that the caller has, or will take."""

    lease: Lease
    active: ActiveLease
    loaded: LoadedDuring
    payload: "asyncio.Future[GroupPayload]"
    settled: "asyncio.Future[Result]"
    taken: bool = False


@dataclass(slots=True, eq=False)
class PendingLoad:
    """Weights that wait for the caller to load them."""

    weights: PulledVersion
    done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Caller:
    """The session's producer: waits for the caller to take, load and push."""

    def __init__(self, recipe: Recipe, config: Config, max_lease_s: float) -> None:
        self._recipe = recipe
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
        """Return the group that the caller pushes. Samples of another instance are ignored: the group starts over."""
        loop, assign = asyncio.get_running_loop(), active.assign
        lease = Lease(
            group=assign.group,
            id=assign.lease,
            row=row,
            lineage=assign.lineage,
            min_version=assign.version,
            max_version=None if self._bound is None else Version(assign.version + self._bound),
            group_size=self._recipe.group_size,
            sampling=self._recipe.sampling,
            seeds=tuple(self._recipe.sample_seed(assign, n) for n in range(self._recipe.group_size)),
            interrupted=active.interrupted,
        )
        one = OpenLease(lease, active, LoadedDuring(), loop.create_future(), loop.create_future())
        if not self.open:
            self._busy_since_s = loop.time()
        self.open[lease.id] = one
        self.changed.set()
        try:
            async with asyncio.timeout(self._max_lease_s):
                payload = await one.payload
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
        self._generated += payload.num_tokens
        return payload

    def interrupt(self, active: ActiveLease) -> None:
        """Tell the caller to push soon."""
        active.interrupted = True
        if (one := self.open.get(active.assign.lease)) is not None:
            one.lease.interrupted = True
            one.lease.changed()

    def leave_group(self, active: ActiveLease) -> None:
        """Ignore the order: only the caller has the tokens. The group stays under its lease."""

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
