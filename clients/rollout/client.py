"""A place in a run for an engine of your own::

    with staleflow.RolloutClient("runs/live", load=engine.load) as client:
        for lease in client.leases():                       # until the run ends
            samples = engine.generate(lease.row["prompt"], lease.group_size, lease.sampling)
            client.push(lease, prompt_ids, samples)

``RolloutClient`` blocks, ``AsyncRolloutClient`` is the same for asyncio. Heartbeats, pulls and pushes run beside the
caller, on its event loop or in a thread. ``load`` is called inside ``take`` and ``leases``, in the caller's thread: an
engine is never loaded while it generates, unless its own tasks do.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from numpy.typing import NDArray

from staleflow.clients.attached import ATTACH_TIMEOUT_S, AttachedClient, Blocking
from staleflow.clients.rollout.caller import Caller, Offer, OpenLease, PendingLoad
from staleflow.clients.rollout.engines.base import LoadError
from staleflow.clients.rollout.groups import Recipe
from staleflow.clients.rollout.samples import Lease, LeaseError, Sample, group_payload
from staleflow.clients.rollout.session import LEAVE_TIMEOUT_S, GiveUp, LeaseSession
from staleflow.clients.weights import PulledVersion, Puller
from staleflow.clients.weights.mirror import mirror_url
from staleflow.configs.errors import MISSING, ConfigError
from staleflow.configs.loading.load import model_dir
from staleflow.net.errors import Refused
from staleflow.net.permissions import Role
from staleflow.net.transport import Transport
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Version
from staleflow.protocols.wire.messages import InstanceStats

T = TypeVar("T")

Load = Callable[[PulledVersion], Awaitable[None] | None]
"""Loads a version into the engine. Its bytes stay readable until the call, or what it returns, is done."""

LEASE_TIMEOUT_S = 1800.0
"""Default of ``max_lease_s``."""
MOVE_TIMEOUT_S = 10.0
"""Default time that a group waits for a place at another worker."""


class AsyncRolloutClient(AttachedClient):
    """A rollout worker of a run whose groups the caller generates. Use it with ``async with``, in one event loop.

    ``close`` leaves the run: pushes in progress are delivered, other leases released.
    """

    def __init__(
        self,
        run: Path | str,
        load: Load | None = None,
        *,
        name: str,
        capacity: int = 4,
        max_lease_s: float = LEASE_TIMEOUT_S,
        timeout_s: float = ATTACH_TIMEOUT_S,
        transport: Transport | None = None,
    ) -> None:
        """``run``: its directory, or its scheduler's address. ``load`` may also be set later, before the first
        ``take``. ``capacity``: maximum number of leases held at once. ``max_lease_s``: a lease that is held for longer
        is released, as a caller that hangs must not hold up the run. ``timeout_s``: of attaching. ``transport``: with
        the key of a rollout worker; default: the run's, or the key named by STALEFLOW_KEY.
        """
        if capacity < 1:
            raise ConfigError("capacity", capacity, "it must be at least 1")
        if not max_lease_s > 0:
            raise ConfigError("max_lease_s", max_lease_s, "it must be above 0")
        super().__init__(run, Role.ROLLOUT, name=name, timeout_s=timeout_s, transport=transport)
        self.load = load
        """Called with each version that the run orders, inside ``take``."""
        self._capacity = capacity
        self._max_lease_s = max_lease_s
        self._caller: Caller
        self._recipe: Recipe
        self._session: LeaseSession
        self._running: asyncio.Task[None]
        self.run_dir = Path()
        """Run directory on the scheduler's machine."""

    async def _open(self) -> None:
        attached = await self._attach("rollout", capacity=self._capacity, parameters=True)
        config, me = self.config, self._me
        self.run_dir = Path(attached.run_dir)
        shards = [self._client(address) for address in attached.shards]
        deltas, direct = config.parameters.delta != "off", config.parameters.transport == "direct"
        puller = Puller(
            attached.parameters,
            worker=me,
            transport=self._transport,
            deltas=deltas,
            direct=direct,
            mirror=mirror_url(config, attached.run),
        )
        self._stack.callback(puller.close)
        recipe = Recipe.of(config)
        self._recipe = recipe
        self._caller = Caller(recipe, config, self._max_lease_s, self._scheduler, shards)
        self._session = LeaseSession(me, self._scheduler, shards, puller, self._caller, recipe)
        self._running = asyncio.ensure_future(self._work())
        self._running.add_done_callback(lambda _: self._caller.changed.set())
        self._stack.push_async_callback(self._leave)

    async def _work(self) -> None:
        try:
            await self._session.run()
        except Refused as refused:
            if not refused.is_over:
                raise

    async def _leave(self) -> None:
        drained = self._running.done()
        self._running.cancel()
        await asyncio.wait((self._running,))
        await self._session.leave("drained" if drained else "closed")
        self._caller.close()

    @property
    def model_dir(self) -> Path:
        """Directory of the initial model and its tokenizer: ``model.path``, or in the run directory."""
        return model_dir(self.config, self.run_dir)

    @property
    def version(self) -> Version:
        """Loaded version; -1 before the first."""
        return self._caller.loaded[1]

    @property
    def ended(self) -> bool:
        """True once no further lease can come: the run drains or is over."""
        return self._running.done()

    async def take(self, at_most: int = 1, *, timeout_s: float | None = None) -> list[Lease]:
        """Return new leases, at least one; none after ``timeout_s``, or once the run has ``ended``.

        Load the versions that the run orders meanwhile. An error of ``load`` is raised here after the run was notified
        that the version is not loaded. Raise ``ConfigError`` if the run rejects this worker.
        """
        while True:
            new = await self.next_event(at_most, timeout_s)
            if not isinstance(new, PendingLoad):
                return new
            try:
                result = self.loader()(new.weights)
                if inspect.isawaitable(result):
                    await result
            except BaseException as error:
                await self.loaded(new, error)
                raise
            await self.loaded(new)

    async def leases(self) -> AsyncGenerator[Lease]:
        """Yield one lease after another until the run has ``ended``."""
        while taken := await self.take():
            yield taken[0]

    async def push(self, lease: Lease, prompt_ids: Sequence[int] | NDArray[Any], samples: Sequence[Sample]) -> bool:
        """Deliver a group. Return True once it is durable and registered, False if the lease had ended before.

        Raise ``LeaseError`` if the samples do not match the lease, which is then still held, and ``Refused`` if the
        run rejects them, which releases it.
        """
        if (one := self._find(lease)) is None:
            return False
        one.outcome.set_result(group_payload(lease, prompt_ids, samples, one.loaded, self._recipe.columns))
        lease.used = True
        await asyncio.wait((one.settled, self._running), return_when=asyncio.FIRST_COMPLETED)
        if not one.settled.done():  # the run is over; its servers may still accept the push, or be gone
            await asyncio.wait((one.settled,), timeout=LEAVE_TIMEOUT_S)
        if not one.settled.done():
            self._running.result()
            return False
        result = one.settled.result()
        if result.code in (Code.STALE_LEASE, Code.STALE):
            return False
        if result.code not in (None, Code.DUPLICATE):
            raise Refused(cast(Code, result.code), f"{lease}: {result.detail}")
        return True

    async def partial(
        self,
        lease: Lease,
        prompt_ids: Sequence[int] | NDArray[Any],
        samples: Sequence[Sample],
        *,
        timeout_s: float = MOVE_TIMEOUT_S,
    ) -> bool:
        """Hand over a group in its current state; another worker continues it from these tokens.

        ``samples``: all ``group_size`` of them; those that are not finished have ``finish="interrupted"`` and may have
        no tokens. ``timeout_s``: maximum time to wait for a free place at a worker whose weights are new enough; the
        next one is reserved for the group. Return True once the lease is over, as another worker has the group or the
        run had taken it back. Return False if it is still held: there was no such worker or no place, or the run wants
        the tokens so far (``lease.interrupted``). Raise ``LeaseError`` if the samples do not match the lease, and
        ``Refused`` if the run rejects them; the lease is still held then, too.
        """
        if (one := self._find(lease)) is None:
            return True
        if self.config.environment.run:
            where = f"environment.run is {self.config.environment.run!r}"
            raise LeaseError(f"{lease}: {where}; episodes do not move, so push or release the lease")
        group = one.takeover.partial(lease, prompt_ids, samples, one.loaded, self._recipe)
        if lease.interrupted:
            return False
        loop = asyncio.get_running_loop()
        made = Offer(group, loop.time() + timeout_s, loop.create_future())
        one.outcome.set_result(made)
        lease.used = True
        await asyncio.wait((made.answer, one.settled, self._running), return_when=asyncio.FIRST_COMPLETED)
        if not made.answer.done():  # the run took the lease back, or is over
            if not one.settled.done():
                self._running.result()
            return True
        if isinstance(answer := made.answer.result(), Refused):
            raise answer
        return answer

    async def release(self, lease: Lease, why: str, *, hopeless: bool = False) -> None:
        """Give a lease back; the run generates its group again, elsewhere. ``hopeless``: no engine can, for example
        because the prompt is too long."""
        if (one := self._find(lease)) is not None:
            one.outcome.set_exception(GiveUp(f"at {self.name}, {why}", hopeless=hopeless))
            lease.used = True
            await asyncio.sleep(0)  # the session sends the release

    def report(self, stats: InstanceStats) -> None:
        """Replace the numbers that the client derives from its leases, for status and the strategies of the scheduler.

        Reports are sent every second, and renew the leases. The loaded version is filled in.
        """
        self._caller.numbers = stats

    def _find(self, lease: Lease) -> OpenLease | None:
        """Return an open lease; None if the run took it back. Raise ``LeaseError`` if it is none of this client's."""
        one = self._caller.open.get(lease.id)
        if one is not None and one.lease is lease and not lease.used:
            return one
        if lease.ended and not lease.used:
            return None
        held = ", ".join(str(one.lease.id) for one in self._caller.open.values() if not one.lease.used)
        allowed = f"it has {held or 'none'}, and each is pushed, handed over or released once"
        raise LeaseError(f"{lease} is not held by {self.name}: {allowed}")

    def loader(self) -> Load:
        if self.load is None:
            raise ConfigError("load", MISSING, "it must be a function that loads a version into the engine")
        return self.load

    async def next_event(self, at_most: int, timeout_s: float | None) -> list[Lease] | PendingLoad:
        """Wait for weights to load or for leases."""
        if at_most < 1:
            raise ConfigError("at_most", at_most, "it must be at least 1")
        caller = self._caller
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    caller.changed.clear()
                    if (pending := caller.pending) is not None:
                        caller.pending = None
                        return pending
                    if new := [one for one in caller.open.values() if not one.taken][:at_most]:
                        for one in new:
                            one.taken, one.loaded.loads = True, [caller.loaded]
                        return [one.lease for one in new]
                    if self._running.done():
                        self._running.result()
                        return []
                    await caller.changed.wait()
        except TimeoutError:
            return []

    async def loaded(self, pending: PendingLoad, error: BaseException | None = None) -> None:
        """Report the end of a load."""
        if not pending.done.done():
            if error is None:
                pending.done.set_result(None)
            else:
                pending.done.set_exception(LoadError(f"{type(error).__name__}: {error}"))
        await asyncio.sleep(0)  # the session notes the version before the caller continues


class RolloutClient(Blocking[AsyncRolloutClient]):
    """The blocking form of ``AsyncRolloutClient``. Use it with ``with``, in one thread."""

    def __init__(
        self,
        run: Path | str,
        load: Load | None = None,
        *,
        name: str,
        capacity: int = 4,
        max_lease_s: float = LEASE_TIMEOUT_S,
        timeout_s: float = ATTACH_TIMEOUT_S,
        transport: Transport | None = None,
    ) -> None:
        """As ``AsyncRolloutClient``."""
        client = AsyncRolloutClient(
            run,
            name=name,
            capacity=capacity,
            max_lease_s=max_lease_s,
            timeout_s=timeout_s,
            transport=transport,
        )
        super().__init__(client, "rollout client")
        self.load = load
        """Called with each version that the run orders, inside ``take``, in this thread."""

    @property
    def model_dir(self) -> Path:
        """Directory of the initial model and its tokenizer: ``model.path``, or in the run directory."""
        return self._client.model_dir

    @property
    def version(self) -> Version:
        """Loaded version; -1 before the first."""
        return self._client.version

    @property
    def ended(self) -> bool:
        """True once no further lease can come: the run drains or is over."""
        return self._client.ended

    def take(self, at_most: int = 1, *, timeout_s: float | None = None) -> list[Lease]:
        """As ``AsyncRolloutClient.take``. With ``timeout_s`` 0 it never waits, for an engine that steps itself."""
        self._client.load = self.load
        while True:
            new = self._wait(self._client.next_event(at_most, timeout_s))
            if isinstance(new, list):
                return new
            try:
                result = self._client.loader()(new.weights)
                if inspect.isawaitable(result):
                    raise ConfigError("load", "a coroutine function", "RolloutClient needs a plain one")
            except BaseException as error:
                self._wait(self._client.loaded(new, error))
                raise
            self._wait(self._client.loaded(new))

    def leases(self) -> Generator[Lease]:
        """Yield one lease after another until the run has ``ended``."""
        while taken := self.take():
            yield taken[0]

    def push(self, lease: Lease, prompt_ids: Sequence[int] | NDArray[Any], samples: Sequence[Sample]) -> bool:
        """As ``AsyncRolloutClient.push``."""
        return self._wait(self._client.push(lease, prompt_ids, samples))

    def partial(
        self,
        lease: Lease,
        prompt_ids: Sequence[int] | NDArray[Any],
        samples: Sequence[Sample],
        *,
        timeout_s: float = MOVE_TIMEOUT_S,
    ) -> bool:
        """As ``AsyncRolloutClient.partial``."""
        return self._wait(self._client.partial(lease, prompt_ids, samples, timeout_s=timeout_s))

    def release(self, lease: Lease, why: str, *, hopeless: bool = False) -> None:
        """As ``AsyncRolloutClient.release``."""
        self._wait(self._client.release(lease, why, hopeless=hopeless))

    def report(self, stats: InstanceStats) -> None:
        """As ``AsyncRolloutClient.report``."""
        self._client.report(stats)
