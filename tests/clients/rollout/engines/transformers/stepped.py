"""An engine that generates tokens only at the test's command."""

import asyncio
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import Engine, EngineStats, Request, Trajectory
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish


class Stepped:
    """An ``AsyncEngine`` over an ``Engine``; construct it inside a running event loop."""

    def __init__(self, engine: Engine) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.engine = engine
        self.given: list[Request] = []
        self._futures: dict[int, asyncio.Future[Trajectory]] = {}

    async def generate(self, request: Request) -> Trajectory:
        self.engine.submit(request)
        self.given.append(request)
        future: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        self._futures[request.id] = future
        try:
            return await future
        finally:
            del self._futures[request.id]
            if future.cancelled():
                self.engine.abort(request.id)

    async def steps(self, count: int = 1) -> None:
        """Generate ``count`` tokens for each request and let the waiting tasks continue."""
        await settled()
        for _ in range(count):
            self._end(self.engine.step())
            await settled()

    async def until_idle(self) -> None:
        """Run until no request is running or waiting."""
        await settled()
        while self.engine.stats().running or self.engine.stats().waiting:
            await self.steps()

    def interrupt(self, request: int, least: int = 1) -> None:
        taken = self.engine.withdraw(request) if least == 0 else None
        if taken is None:
            self.engine.interrupt(request)
        else:
            self._end([Trajectory(id=request, segments=taken.prefix, finish=Finish.INTERRUPTED)])

    def abort(self, request: int) -> None:
        self._futures[request].cancel()

    async def load(self, tensors: Mapping[str, NDArray[np.generic]], lineage: Lineage, version: Version) -> None:
        self.engine.load(tensors, lineage, version)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def busy_s(self) -> float:
        return 0.0

    def tokens_per_s(self) -> float:
        return 0.0

    def stuck_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        """Do nothing: the engine has no resources to release."""

    def _end(self, ended: list[Trajectory]) -> None:
        for trajectory in ended:
            if not self._futures[trajectory.id].done():
                self._futures[trajectory.id].set_result(trajectory)


async def settled() -> None:
    """Wait until every task has run as far as it can."""
    for _ in range(12):
        await asyncio.sleep(0)
