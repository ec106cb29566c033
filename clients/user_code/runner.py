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
from collections.abc import Callable

from staleflow.clients.user_code import pipe
from staleflow.clients.user_code.pool import Pool
from staleflow.clients.user_code.process import Killed, Program
from staleflow.process.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)


class CallFailed(Exception):
    """A call failed in all tries; the text gives the reason."""


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

    async def takes_lists(self) -> bool:
        """Return whether the function takes lists. Raise ``ConfigError`` if it cannot be loaded."""
        return await self._pool.takes_lists()

    async def answer(self, make: Callable[[int], pipe.AnyCall]) -> pipe.Answer:
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

    async def _call(self, make: Callable[[int], pipe.AnyCall]) -> pipe.Answer:
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
