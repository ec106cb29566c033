"""Calls a user's function in a child process, with a time limit a call and retries.

A call that raises, hangs, kills its process or returns what it must not is tried again up to ``retries`` times, then it
has failed. A hanging call costs the child: it is killed and a new one is started. Calls that were merely under way in a
child that another call ended run again and are not charged for it. A call that nobody waits for any more keeps its
place until the child has done with it, so that the time of the next one begins when the child does.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from staleflow.clients.user_code import pipe
from staleflow.clients.user_code.child import NOUN
from staleflow.clients.user_code.pool import Pool
from staleflow.clients.user_code.process import Killed, Program
from staleflow.configs.schema import Reward
from staleflow.process.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)


class CallFailed(Exception):
    """A call has failed, all tries spent; the text says why."""


class RewardFailed(CallFailed):
    """A sample has no reward."""


class CallRunner:
    """One child process at a time; calls beyond what it takes at once wait here. Belongs to one event loop."""

    def __init__(self, program: Program, *, retries: int, concurrency: int) -> None:
        """``concurrency``: calls of an ``async def`` under way at once."""
        self._retries = retries
        self._pool = Pool(program, processes=1, concurrency=concurrency)
        self._said = RateLimitedLog()
        self.failed_calls = 0
        """Tries that failed."""

    @property
    def calls(self) -> int:
        """Most calls under way at once; known once it has started."""
        return self._pool.calls

    async def start(self) -> None:
        """Start the child. ``ConfigError`` when the function cannot be imported."""
        await self._pool.start()

    async def close(self) -> None:
        """Kill the child; calls under way fail."""
        await self._pool.close()

    async def answer(self, make: Callable[[int], pipe.Call | pipe.GroupCall]) -> pipe.Answer:
        """The answer to the call that ``make`` makes of a number; ``CallFailed`` when all tries are spent."""
        answer = pipe.Answer(id=0)
        for attempt in range(self._retries + 1):
            answer = await self._call(make)
            if not answer.error:
                return answer
            self.failed_calls += 1
            if (more := self._said.due()) is not None:
                log.info("try %d of %d: %s%s", attempt + 1, self._retries + 1, answer.error, more)
        tries = f"{self._retries + 1} tries" if self._retries else "1 try"
        raise CallFailed(f"{answer.error} ({tries})")

    async def _call(self, make: Callable[[int], pipe.Call | pipe.GroupCall]) -> pipe.Answer:
        suspicion = 0
        while True:
            calling = asyncio.create_task(self._pool.call(make, suspicion))
            calling.add_done_callback(_ended)
            try:
                return await asyncio.shield(calling)
            except Killed as killed:
                suspicion += killed.suspicion


def _ended(calling: "asyncio.Task[pipe.Answer]") -> None:
    if not calling.cancelled():
        calling.exception()  # who waited for it may have gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one call of a reward is given."""

    prompt: str
    completion: str
    columns: dict[str, Any] = field(default_factory=dict[str, Any])

    def call(self, number: int) -> pipe.Call:
        """As it goes to the child."""
        return pipe.Call(id=number, prompt=self.prompt, completion=self.completion, columns=self.columns)


class RewardRunner:
    """A reward function. Belongs to one event loop."""

    def __init__(self, run: str, *, timeout_s: float, retries: int, concurrency: int) -> None:
        load = pipe.Load(run=run, timeout_s=timeout_s)
        program = Program(module="staleflow.clients.user_code.child", key="reward.run", noun=NOUN, load=load)
        self._calls = CallRunner(program, retries=retries, concurrency=concurrency)

    @classmethod
    def of(cls, settings: Reward) -> "RewardRunner":
        """The reward of a run."""
        return cls(
            settings.run, timeout_s=settings.timeout_s, retries=settings.retries, concurrency=settings.concurrency
        )

    @property
    def calls(self) -> int:
        """Most calls under way at once; known once it has started."""
        return self._calls.calls

    @property
    def failed_calls(self) -> int:
        """Tries that gave no reward."""
        return self._calls.failed_calls

    async def start(self) -> None:
        """Start the child. ``ConfigError`` when the function cannot be imported."""
        await self._calls.start()

    async def close(self) -> None:
        """Kill the child; calls under way fail."""
        await self._calls.close()

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
        try:
            return (await self._calls.answer(sample.call)).value
        except CallFailed as failed:
            raise RewardFailed(str(failed)) from failed
