"""A stage whose columns a model makes in this process, beside the loop: one thread, one group of calls at a time.

The loop must go on answering heartbeats while a model computes, or its worker would be taken for dead.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Protocol, TypeVar

from staleflow.clients.stage.worker import Made, StageGroup

Stopping = Callable[[], bool]
"""True once the worker is asked to end."""
Answer = TypeVar("Answer")


class Ended(Exception):
    """The worker is asked to end; what was under way is dropped, and its groups go to another worker."""


class Judge(Protocol):
    """A model and what it says of groups. Called from one thread; looks at ``stopping`` before every pass."""

    def judge(self, groups: Sequence[StageGroup], stopping: Stopping) -> list[Made]:
        """The columns of each group, in order. ``Ended`` when asked to end."""
        ...

    def accepted(self, groups: Sequence[StageGroup], stopping: Stopping) -> None:
        """Learn from groups whose columns are durable. ``Ended`` when asked to end."""
        ...

    def close(self) -> None:
        """Keep what was learned."""
        ...


class ModelStage:
    """A ``Judge`` as a ``Stage``. Shards that call it at once wait for each other."""

    together: ClassVar[bool] = True

    def __init__(self, open_judge: Callable[[], Judge]) -> None:
        self._open = open_judge
        self._judge: Judge | None = None
        self._thread = ThreadPoolExecutor(1, "model")
        self._stop = threading.Event()

    async def start(self) -> None:
        """Load the model. ``ConfigError`` when it cannot be loaded."""
        self._judge = await self._run(self._open)

    async def close(self) -> None:
        """Ends what is under way; returns once what was learned is kept."""
        self._stop.set()
        if self._judge is not None:
            await self._run(self._judge.close)
        self._thread.shutdown(wait=False)

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[Made]:
        judge = self._loaded()
        return await self._run(lambda: judge.judge(groups, self._stop.is_set))

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        judge = self._loaded()
        await self._run(lambda: judge.accepted(groups, self._stop.is_set))

    def _loaded(self) -> Judge:
        assert self._judge is not None, "start comes first"
        return self._judge

    async def _run(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
