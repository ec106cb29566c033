"""A stage of a run in a process of your own::

    with staleflow.StageClient("runs/live", "reward", name="judge-1") as client:
        for work in client.groups():                              # until the run ends
            client.put(work, {"reward": judge(work.row, work.payload)})

``StageClient`` blocks, ``AsyncStageClient`` is the same for asyncio.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.attached import ATTACH_TIMEOUT_S, AttachedClient, Blocking
from staleflow.clients.attachment import detach
from staleflow.clients.stage.main import while_it_lasts
from staleflow.clients.stage.worker import Failed, StageGroup, StageOutcome, StageWorker
from staleflow.configs.errors import ConfigError
from staleflow.configs.stages import Node, graph
from staleflow.net.errors import Refused
from staleflow.net.permissions import Role
from staleflow.net.transport import Transport
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Detach, Result
from staleflow.protocols.wire.trajectory import made_columns

T = TypeVar("T")
Values = Sequence[float] | NDArray[np.floating[Any]]


class StageError(ValueError):
    """A call does not match its group; the text names the column, the value and what is allowed. Nothing was sent."""


@dataclass(slots=True, eq=False)
class _Open:
    """A group that the caller has, or will take."""

    work: StageGroup
    outcome: "asyncio.Future[StageOutcome]"
    result: "asyncio.Future[Result]"
    taken: bool = False


class _Caller:
    """The stage of the shipped worker: waits until the caller puts the columns of a group."""

    together: ClassVar[bool] = False

    def __init__(self) -> None:
        self.open: list[_Open] = []
        self.changed = asyncio.Event()

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        """Return the columns that the caller put."""
        loop = asyncio.get_running_loop()
        new = [_Open(group, loop.create_future(), loop.create_future()) for group in groups]
        self.open += new
        self.changed.set()
        return [await one.outcome for one in new]

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        """Do nothing: ``settle`` has the result of each group."""

    def settle(self, group: GroupId, result: Result) -> None:
        """Pass the shard's verdict on the first result of a group to the caller."""
        for one in self.open:
            if one.work.group == group and one.outcome.done():
                self.open.remove(one)
                one.result.set_result(result)
                return


class AsyncStageClient(AttachedClient):
    """A worker of one stage whose columns the caller computes. Use it with ``async with``, in one event loop.

    ``close`` leaves the run; groups without columns go to another worker.
    """

    def __init__(
        self,
        run: Path | str,
        stage: str,
        *,
        name: str,
        capacity: int = 16,
        timeout_s: float = ATTACH_TIMEOUT_S,
        transport: Transport | None = None,
    ) -> None:
        """``run``: its directory, or its scheduler's address. ``stage``: ``"reward"``, or a ``[[stage]]`` of the run.
        ``capacity``: maximum number of groups of each trajectory server held at once. ``timeout_s``: of attaching.
        """
        if capacity < 1:
            raise ConfigError("capacity", capacity, "it must be at least 1")
        super().__init__(run, Role.STAGE, name=name, timeout_s=timeout_s, transport=transport)
        self.stage = stage
        self._capacity = capacity
        self._node: Node
        self._caller: _Caller
        self._running: asyncio.Task[None]

    async def _open(self) -> None:
        attached = await self._attach("stage", stage=self.stage)
        self._stack.push_async_callback(detach, self._scheduler, Detach(worker=self._me, why="closed"))
        self._node = next(node for node in graph(self.config) if node.name == self.stage)
        shards = [self._client(address) for address in attached.shards]
        caller = self._caller = _Caller()
        worker = StageWorker(
            worker=self._me, name=self.stage, stage=caller, max_groups=self._capacity, on_result=caller.settle
        )
        serving = asyncio.ensure_future(worker.serve(shards))
        self._running = asyncio.ensure_future(while_it_lasts(self._scheduler, serving))
        self._running.add_done_callback(lambda _: caller.changed.set())
        self._stack.push_async_callback(self._stop)

    async def _stop(self) -> None:
        self._running.cancel()
        await asyncio.wait((self._running,))
        for one in self._caller.open:
            if not one.result.done():
                one.result.set_result(Result(code=Code.STALE_LEASE, detail="the client was closed"))

    @property
    def ended(self) -> bool:
        """True once the run is over."""
        return self._running.done()

    async def take(self, at_most: int = 1, *, timeout_s: float | None = None) -> list[StageGroup]:
        """Return new groups, at least one; none after ``timeout_s``, or once the run has ``ended``."""
        if at_most < 1:
            raise ConfigError("at_most", at_most, "it must be at least 1")
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._caller.changed.clear()
                    if new := [one for one in self._caller.open if not one.taken][:at_most]:
                        for one in new:
                            one.taken = True
                        return [one.work for one in new]
                    if self._running.done():
                        self._running.result()
                        return []
                    await self._caller.changed.wait()
        except TimeoutError:
            return []

    async def groups(self) -> AsyncGenerator[StageGroup]:
        """Yield one group after another until the run has ``ended``."""
        while taken := await self.take():
            yield taken[0]

    async def put(self, work: StageGroup, columns: Mapping[str, Values]) -> bool:
        """Deliver the columns of a group. Return True once they are durable, False if another worker has the group.

        Raise ``StageError`` unless ``columns`` are those of the stage, one float32 a sample, or a completion token.
        """
        one = self._find(work)
        if not columns:
            raise StageError(f"group {work.group}: no columns; {self.stage} must make {', '.join(self._node.makes)}")
        try:
            arrays = {name: np.asarray(values, np.float32) for name, values in columns.items()}
            samples, tokens = work.payload.num_samples, work.payload.num_tokens
            made = made_columns(self.stage, arrays, makes=self._node.makes, samples=samples, tokens=tokens)
        except (ProtocolError, TypeError, ValueError) as error:
            raise StageError(f"group {work.group}: {error}") from error
        return await self._return(one, made)

    async def fail(self, work: StageGroup, why: str) -> bool:
        """Report that the group has no columns: another worker retries it, and then it is released. As ``put``."""
        return await self._return(self._find(work), Failed(why or "no reason given"))

    def _find(self, work: StageGroup) -> _Open:
        for one in self._caller.open:
            if one.work is work and not one.outcome.done():
                return one
        raise StageError(f"group {work.group} is not with {self.name}; each group is put or failed once")

    async def _return(self, one: _Open, outcome: StageOutcome) -> bool:
        one.outcome.set_result(outcome)
        await asyncio.wait((one.result, self._running), return_when=asyncio.FIRST_COMPLETED)
        if not one.result.done():  # the run is over
            self._running.result()
            return False
        result = one.result.result()
        if result.code in (Code.STALE_LEASE, Code.STALE):
            return False
        if result.code not in (None, Code.DUPLICATE):
            raise Refused(cast(Code, result.code), f"group {one.work.group}: {result.detail}")
        return True


class StageClient(Blocking[AsyncStageClient]):
    """The blocking form of ``AsyncStageClient``. Use it with ``with``, in one thread."""

    def __init__(
        self,
        run: Path | str,
        stage: str,
        *,
        name: str,
        capacity: int = 16,
        timeout_s: float = ATTACH_TIMEOUT_S,
        transport: Transport | None = None,
    ) -> None:
        """As ``AsyncStageClient``."""
        client = AsyncStageClient(run, stage, name=name, capacity=capacity, timeout_s=timeout_s, transport=transport)
        super().__init__(client, "stage client")

    @property
    def ended(self) -> bool:
        """True once the run is over."""
        return self._client.ended

    def take(self, at_most: int = 1, *, timeout_s: float | None = None) -> list[StageGroup]:
        """As ``AsyncStageClient.take``."""
        return self._wait(self._client.take(at_most, timeout_s=timeout_s))

    def groups(self) -> Generator[StageGroup]:
        """Yield one group after another until the run has ``ended``."""
        while taken := self.take():
            yield taken[0]

    def put(self, work: StageGroup, columns: Mapping[str, Values]) -> bool:
        """As ``AsyncStageClient.put``."""
        return self._wait(self._client.put(work, columns))

    def fail(self, work: StageGroup, why: str) -> bool:
        """As ``AsyncStageClient.fail``."""
        return self._wait(self._client.fail(work, why))
