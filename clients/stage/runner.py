"""Calls a user's reward function in a child process, with a time limit a call and retries.

A call that raises, hangs, kills its process or returns no finite number is tried again up to ``retries`` times, then
its sample has failed. A hanging call costs the child: it is killed and a new one is started. Calls that were merely
under way in a killed child run again and are not charged for it.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from staleflow.clients.stage import pipe
from staleflow.clients.stage.child import took_too_long
from staleflow.configs.errors import ConfigError

log = logging.getLogger(__name__)

IMPORT_TIMEOUT_S = 120.0
"""A module may load a model of its own."""
CONCURRENT_CALLS = 64
"""Of an ``async def``; others run one at a time."""
GRACE_S = 1.0
"""The child of an ``async def`` ends overdue calls by itself; only long after that is it taken to hang as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one call is given."""

    prompt: str
    completion: str
    columns: dict[str, Any] = field(default_factory=dict[str, Any])


class RewardFailed(Exception):
    """A sample has no reward, all tries spent; the text says why."""


class _Killed(Exception):
    """The child was killed because of another call."""


class RewardRunner:
    """One child process at a time; calls beyond what it takes at once wait here. Belongs to one event loop."""

    def __init__(self, run: str, *, timeout_s: float, retries: int) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._retries = retries
        self._child: _Child | None = None
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
                return await child.call(sample)
            except _Killed:
                continue

    async def _living(self) -> "_Child":
        async with self._starting:
            if self._child is None or self._child.gone:
                self._child = await _Child.start(self._run, self._timeout_s)
            return self._child


class _Child:
    """A started process, its pipe, and the calls under way in it."""

    def __init__(self, process: asyncio.subprocess.Process, timeout_s: float) -> None:
        self._process = process
        self._timeout_s = timeout_s
        self._pending: dict[int, asyncio.Future[pipe.Answer]] = {}
        self._last_id = 0
        self._reading: asyncio.Task[None] | None = None
        self.concurrent = False
        self.gone = False

    @classmethod
    async def start(cls, run: str, timeout_s: float) -> "_Child":
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "staleflow.clients.stage.child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        child = cls(process, timeout_s)
        try:
            async with asyncio.timeout(IMPORT_TIMEOUT_S):
                await child._send(pipe.Load(run=run, timeout_s=timeout_s))
                answer = await child._receive()
        except BaseException as error:
            await child.kill()
            if isinstance(error, TimeoutError):
                raise ConfigError("reward.run", run, f"it must be importable within {IMPORT_TIMEOUT_S:g} s") from None
            raise
        if not isinstance(answer, pipe.Loaded):
            await child.kill()
            why = answer.why if isinstance(answer, pipe.NotLoaded) else "it must be importable; its process died"
            raise ConfigError("reward.run", run, why)
        child.concurrent = answer.concurrent
        child._reading = asyncio.create_task(child._read_answers())
        return child

    async def call(self, sample: Sample) -> pipe.Answer:
        """The child's answer, or one that says that it hung or died; ``_Killed`` when another call's fault ends it."""
        if self.gone:
            raise _Killed
        self._last_id += 1
        call = pipe.Call(id=self._last_id, prompt=sample.prompt, completion=sample.completion, columns=sample.columns)
        future: asyncio.Future[pipe.Answer] = asyncio.get_running_loop().create_future()
        self._pending[call.id] = future
        limit_s = 2 * self._timeout_s + GRACE_S if self.concurrent else self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._send(call)
                return await future
        except TimeoutError:
            self._pending.pop(call.id, None)
            self._end_calls(_Killed())
            await self.kill()
            return pipe.Answer(id=call.id, error=took_too_long(self._timeout_s))
        finally:
            self._pending.pop(call.id, None)

    async def kill(self) -> None:
        """End the process, and those it started, whatever it does."""
        self.gone = True
        self._end_process()
        await self._process.wait()
        if self._reading is not None and self._reading is not asyncio.current_task():
            await self._reading

    def _end_process(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _send(self, message: pipe.ToChild) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # its end shows at the other pipe
            self._process.stdin.write(pipe.frame(message))
            await self._process.stdin.drain()

    async def _receive(self) -> pipe.FromChild | None:
        assert self._process.stdout is not None
        try:
            (length,) = pipe.LENGTH.unpack(await self._process.stdout.readexactly(pipe.LENGTH.size))
            return pipe.from_child.decode(await self._process.stdout.readexactly(length))
        except asyncio.IncompleteReadError:
            return None

    async def _read_answers(self) -> None:
        while isinstance(answer := await self._receive(), pipe.Answer):
            self._settle(answer)
        self.gone = True
        self._end_process()
        if isinstance(answer, pipe.Hung):
            self._settle(pipe.Answer(id=answer.id, error=took_too_long(self._timeout_s)))
            self._end_calls(_Killed())
        code = await self._process.wait()
        for call in list(self._pending):
            self._settle(pipe.Answer(id=call, error=f"the reward's process ended with code {code}"))

    def _settle(self, answer: pipe.Answer) -> None:
        future = self._pending.pop(answer.id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def _end_calls(self, why: _Killed) -> None:
        self.gone = True
        for future in self._pending.values():
            if not future.done():
                future.set_exception(why)
        self._pending.clear()
