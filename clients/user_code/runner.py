"""Run a user's function in a child process, with a time limit per call and retries.

- A call that raises, hangs, kills its process or returns an invalid value is retried up to ``retries`` times; then it
  has failed.
- A hanging call costs the child: the child is killed and replaced. Other calls in progress there run again without
  being charged.
- A cancelled call keeps its place until the child has finished it, so that the time limit of the next call starts when
  the child starts that call.
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
    """A call failed in all tries; the text gives the reason."""


class RewardFailed(CallFailed):
    """A sample has no reward."""


class CallRunner:
    """Runner with one child process at a time; excess calls wait. Owned by one event loop."""

    def __init__(self, program: Program, *, retries: int, concurrency: int) -> None:
        """``concurrency``: maximum number of concurrent calls of an ``async def``."""
        self._retries = retries
        self._pool = Pool(program, processes=1, concurrency=concurrency)
        self._log_limit = RateLimitedLog()
        self.failed_calls = 0
        """Number of failed tries."""

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
        """Run the call that ``make`` builds from a number and return its answer. Raise ``CallFailed`` after the last
        try."""
        answer = pipe.Answer(id=0)
        for attempt in range(self._retries + 1):
            answer = await self._call(make)
            if not answer.error:
                return answer
            self.failed_calls += 1
            if (more := self._log_limit.due()) is not None:
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
        calling.exception()  # retrieved, because the caller may have been cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Arguments of one call of a reward."""

    prompt: str
    completion: str
    columns: dict[str, Any] = field(default_factory=dict[str, Any])

    def call(self, number: int) -> pipe.Call:
        """Return the message to the child."""
        return pipe.Call(id=number, prompt=self.prompt, completion=self.completion, columns=self.columns)


class RewardRunner(CallRunner):
    """Runner of a reward function."""

    def __init__(self, run: str, *, timeout_s: float, retries: int, concurrency: int) -> None:
        load = pipe.Load(run=run, timeout_s=timeout_s)
        program = Program(module="staleflow.clients.user_code.child", key="reward.run", noun=NOUN, load=load)
        super().__init__(program, retries=retries, concurrency=concurrency)

    @classmethod
    def of(cls, settings: Reward) -> "RewardRunner":
        """Create the runner of a run's reward."""
        return cls(
            settings.run, timeout_s=settings.timeout_s, retries=settings.retries, concurrency=settings.concurrency
        )

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return the reward of each sample, in order. Raise ``RewardFailed`` once one has failed for good."""
        tasks = [asyncio.ensure_future(self.score_one(sample)) for sample in samples]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def score_one(self, sample: Sample) -> float:
        """Return the reward of one sample. Raise ``RewardFailed`` after the last try."""
        try:
            return (await self.answer(sample.call)).value
        except CallFailed as failed:
            raise RewardFailed(str(failed)) from failed
