"""Calls a user's reward function in a child process, with a time limit a call and retries.

A call that raises, hangs, kills its process or returns no finite number is tried again up to ``retries`` times, then
its sample has failed. A hanging call costs the child: it is killed and a new one is started. Calls that were merely
under way in a killed child run again and are not charged for it.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from staleflow.clients.stage import pipe
from staleflow.clients.stage.child import NOUN
from staleflow.clients.stage.process import Killed, Program, UserProcess

log = logging.getLogger(__name__)

CONCURRENT_CALLS = 64
"""Of an ``async def``; others run one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one call is given."""

    prompt: str
    completion: str
    columns: dict[str, Any] = field(default_factory=dict[str, Any])

    def call(self, number: int) -> pipe.Call:
        """As it goes to the child."""
        return pipe.Call(id=number, prompt=self.prompt, completion=self.completion, columns=self.columns)


class RewardFailed(Exception):
    """A sample has no reward, all tries spent; the text says why."""


class RewardRunner:
    """One child process at a time; calls beyond what it takes at once wait here. Belongs to one event loop."""

    def __init__(self, run: str, *, timeout_s: float, retries: int) -> None:
        load = pipe.Load(run=run, timeout_s=timeout_s)
        self._program = Program(module="staleflow.clients.stage.child", key="reward.run", noun=NOUN, load=load)
        self._retries = retries
        self._child: UserProcess | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(1)
        self.failed_calls = 0
        """Tries that gave no reward."""

    async def start(self) -> None:
        """Start the child. ``ConfigError`` when the function cannot be imported."""
        child = await self._living()
        self._slots = asyncio.Semaphore(CONCURRENT_CALLS if child.concurrent else 1)

    async def close(self) -> None:
        """Kill the child; calls under way fail."""
        if self._child is not None:
            await self._child.kill()

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """The reward of each sample, in order; ``RewardFailed`` as soon as one has failed for good."""
        tasks = [asyncio.ensure_future(self.score_one(sample)) for sample in samples]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def score_one(self, sample: Sample) -> float:
        """The reward of one sample; ``RewardFailed`` when all tries are spent."""
        answer = pipe.Answer(id=0)
        for attempt in range(self._retries + 1):
            async with self._slots:
                answer = await self._call(sample)
            if not answer.error:
                return answer.value
            self.failed_calls += 1
            log.info("try %d of %d: %s", attempt + 1, self._retries + 1, answer.error)
        raise RewardFailed(f"{answer.error} ({self._retries + 1} tries)")

    async def _call(self, sample: Sample) -> pipe.Answer:
        while True:
            child = await self._living()
            try:
                return await child.call(sample.call)
            except Killed:
                continue

    async def _living(self) -> UserProcess:
        async with self._starting:
            if self._child is None or self._child.gone:
                self._child = await UserProcess.start(self._program)
            return self._child
