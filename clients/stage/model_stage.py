"""A stage whose columns a model computes in this process: one thread, one batch of groups at a time.

The event loop must stay free while a model computes: a worker that misses its heartbeats is considered dead.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Generic, Protocol, TypeVar

from staleflow.clients.stage.history import RunHistory, newest
from staleflow.clients.stage.worker import StageGroup, StageOutcome

Stopping = Callable[[], bool]
"""Function that returns True once the worker is stopping."""
Result = TypeVar("Result")


class Ended(Exception):
    """The worker is stopping: work in progress is discarded, and its groups go to another worker."""


class Judge(Protocol):
    """A model that evaluates groups. Called from one thread; checks ``stopping`` before every pass."""

    def judge(self, groups: Sequence[StageGroup], stopping: Stopping) -> list[StageOutcome]:
        """Return the columns of each group, in order. Raise ``Ended`` if the worker is stopping."""
        ...

    def accepted(self, groups: Sequence[StageGroup], stopping: Stopping) -> None:
        """Learn from groups whose columns are durable. Raise ``Ended`` if the worker is stopping."""
        ...

    def close(self) -> None:
        """Save the learned state."""
        ...


class Follower(Judge, Protocol):
    """A model whose state belongs to the history of the run."""

    def follow(self, history: RunHistory) -> None:
        """Adopt the history; go back to a state that belongs to it if the current one does not."""
        ...


J = TypeVar("J", bound=Judge)


class ModelStage(Generic[J]):
    """Adapter from ``Judge`` to ``Stage``. Concurrent calls of shards are serialized."""

    together: ClassVar[bool] = True

    def __init__(self, open_judge: Callable[[], J]) -> None:
        self._open = open_judge
        self._judge: J | None = None
        self._thread = ThreadPoolExecutor(1, "model")
        self._stop = threading.Event()

    async def start(self) -> None:
        """Load the model. Raise ``ConfigError`` if it cannot be loaded."""
        self._judge = await self._run(self._open)

    async def close(self) -> None:
        """Stop the work in progress; return once the learned state is saved."""
        self._stop.set()
        if self._judge is not None:
            await self._run(self._judge.close)
        self._thread.shutdown(wait=False)

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        judge = self._loaded()
        return await self._run(lambda: judge.judge(groups, self._stop.is_set))

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        judge = self._loaded()
        await self._run(lambda: judge.accepted(groups, self._stop.is_set))

    def _loaded(self) -> J:
        assert self._judge is not None, "call start first"
        return self._judge

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class FollowingStage(ModelStage[Follower]):
    """A model stage that rolls back with the run. It starts to work once it knows the history of the run."""

    def __init__(self, open_judge: Callable[[], Follower]) -> None:
        super().__init__(open_judge)
        self._history: RunHistory | None = None
        self._followed = asyncio.Event()

    async def follow(self, history: RunHistory) -> None:
        """Let the judge adopt the history of the run."""
        if history != self._history:
            judge = self._loaded()
            await self._run(lambda: judge.follow(history))
            self._history = history
            self._followed.set()

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        await self._catch_up(groups)
        return await super().make(groups)

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        await self._catch_up(groups)
        await super().accepted(groups)

    async def _catch_up(self, groups: Sequence[StageGroup]) -> None:
        """Wait until the judge follows the lineage of these groups. They may arrive before the rollback is
        known, because the worker polls the scheduler."""
        lineage = max((newest(group.payload)[0] for group in groups), default=0)
        while self._history is None or self._history.lineage < lineage:
            self._followed.clear()
            await self._followed.wait()
