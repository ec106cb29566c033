"""A process of user code, its pipe, and its calls in progress.

- User code affects the worker only through answers and the end of the pipe. A call that raises is answered with the
  reason. A call that hangs, or ignores its cancellation, costs the process.
- A process that dies leaves a mark that names the call that ended it, where that can be known. The others are
  ``Killed`` and may run again.
- The process ranks below its worker: the kernel kills it first when memory runs out, and it dies with its worker, along
  with everything that it started.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO

import msgspec

from staleflow.clients.user_code import mark, pipe
from staleflow.clients.user_code.child import took_too_long
from staleflow.configs.errors import ConfigError
from staleflow.process.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)
_log_limit = RateLimitedLog()

IMPORT_TIMEOUT_S = 120.0
"""Timeout of the import; long, because a module may load a model of its own."""
GRACE_S = 1.0
"""Extra time for a child with concurrent calls, which ends overdue calls itself; a child that takes longer hangs."""
CANCEL_TIMEOUT_S = 2.0
"""Time for a cancelled call to end; after that its process is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Program of such a process, and its name in messages to the operator."""

    module: str
    key: str
    """Configuration key that names the user's code."""
    noun: str
    load: pipe.Load
    cancels: bool = False
    """True: cancel a call in the process, too, if its caller is cancelled."""


class Killed(Exception):
    """The process was ended because of another call, or of an unknown one.

    ``suspicion``: evidence against this call, relative to ``CONDEMNED``.
    """

    def __init__(self, suspicion: int = 1) -> None:
        super().__init__()
        self.suspicion = suspicion


CONDEMNED = 8
"""Suspicion that moves a call into a process of its own.

After so many crashes beside it, the call is more likely their cause than a bystander; a bystander finishes there.
"""
UNKNOWN = CONDEMNED // 2
"""Suspicion of every call in a process that died without naming one of them."""


class UserProcess:
    """A started process. Owned by one event loop."""

    def __init__(
        self, process: asyncio.subprocess.Process, lifeline: FileIO, program: Program, page: mmap.mmap
    ) -> None:
        self._process = process
        self._page = page
        self._lifeline = lifeline
        self._program = program
        self._timeout_s = program.load.timeout_s
        self._pending: dict[int, asyncio.Future[pipe.Answer]] = {}
        self._last_id = 0
        self._reading: asyncio.Task[None] | None = None
        self._cancelling: set[asyncio.Task[None]] = set()
        self.concurrent = False
        self.lists = False
        self.gone = False

    @classmethod
    async def start(cls, program: Program) -> "UserProcess":
        """Start a process and load the user's code. Raise ``ConfigError`` if that fails."""
        its_end, ours = os.pipe()
        lifeline = FileIO(ours, "wb")
        its_mark, page = mark.allocate()
        spawning = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *(sys.executable, "-m", program.module, str(its_mark), str(its_end)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(its_mark, its_end),
                start_new_session=True,
            )
        )
        try:
            process = await asyncio.shield(spawning)
        except (
            asyncio.CancelledError
        ):  # shielded: if the spawn itself is cancelled, uvloop leaks a process that its close waits for
            process = await spawning
            await cls(process, lifeline, program, page).kill()
            raise
        except BaseException:
            lifeline.close()
            raise
        finally:
            os.close(its_end)
            os.close(its_mark)
        child = cls(process, lifeline, program, page)
        try:
            async with asyncio.timeout(IMPORT_TIMEOUT_S):
                await child._send(program.load)
                answer = await child._receive()
        except BaseException as error:
            await child.kill()
            if isinstance(error, TimeoutError):
                allowed = f"it must be importable within {IMPORT_TIMEOUT_S:g} s"
                raise ConfigError(program.key, program.load.run, allowed) from None
            raise
        if not isinstance(answer, pipe.Loaded):
            await child.kill()
            why = answer.why if isinstance(answer, pipe.NotLoaded) else "it must be importable; its process died"
            raise ConfigError(program.key, program.load.run, why)
        child.concurrent, child.lists = answer.concurrent, answer.lists
        child._reading = asyncio.create_task(child._read_answers())
        return child

    async def call(self, make: Callable[[int], pipe.AnyCall]) -> pipe.Answer:
        """Run the call that ``make`` builds from a number; return its answer, or an error if it hung or died.

        Raise ``Killed`` if the process ended because of another call, or of an unknown one.
        """
        if self.gone:
            raise Killed
        self._last_id += 1
        call = make(self._last_id)
        future: asyncio.Future[pipe.Answer] = asyncio.get_running_loop().create_future()
        self._pending[call.id] = future
        limit_s = 2 * self._timeout_s + GRACE_S if self.concurrent else self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._send(call)
                return await future
        except TimeoutError:
            self._pending.pop(call.id, None)
            self._end_calls(Killed())
            await self.kill()
            return pipe.Answer(id=call.id, error=took_too_long(self._timeout_s, self._program.noun))
        except asyncio.CancelledError:
            if self._program.cancels and not self.gone:
                cancelling = asyncio.create_task(self._cancel_call(call.id))
                self._cancelling.add(cancelling)
                cancelling.add_done_callback(self._cancelling.discard)
            raise
        finally:
            self._pending.pop(call.id, None)

    async def _cancel_call(self, call: int) -> None:
        """Cancel a call in the process; kill the process if the call does not end in time."""
        future: asyncio.Future[pipe.Answer] = asyncio.get_running_loop().create_future()
        self._pending[call] = future
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await self._send(pipe.Cancel(id=call))
                await future
        except TimeoutError:
            log.warning(
                "%s did not end within %g s of its cancellation, killing its process",
                self._program.noun,
                CANCEL_TIMEOUT_S,
            )
            self._pending.pop(call, None)
            self._end_calls(Killed())
            await self.kill()
        except Killed:
            pass
        finally:
            self._pending.pop(call, None)

    async def kill(self) -> None:
        """Kill the process and everything it started."""
        self.gone = True
        self._end_process()
        await self._process.wait()
        if self._reading is not None and self._reading is not asyncio.current_task():
            await self._reading

    def _end_process(self) -> None:
        self._lifeline.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _send(self, message: pipe.ToChild) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(
            ConnectionError, RuntimeError
        ):  # the reader notices the end of the process; uvloop raises either
            self._process.stdin.write(pipe.frame(message))
            await self._process.stdin.drain()

    async def _receive(self) -> pipe.FromChild | None:
        assert self._process.stdout is not None
        try:
            (length,) = pipe.LENGTH.unpack(await self._process.stdout.readexactly(pipe.LENGTH.size))
            return pipe.from_child.decode(await self._process.stdout.readexactly(min(length, pipe.MAX_FRAME)))
        except (
            asyncio.IncompleteReadError,
            msgspec.DecodeError,
        ):  # the process ended, or user code wrote into the pipe
            return None

    async def _read_answers(self) -> None:
        while isinstance(answer := await self._receive(), pipe.Answer):
            self._settle(answer)
        self.gone = True
        self._end_process()
        if isinstance(answer, pipe.Hung):
            self._settle(pipe.Answer(id=answer.id, error=took_too_long(self._timeout_s, self._program.noun)))
            self._end_calls(Killed())
        code = await self._process.wait()
        if not self._pending:
            return
        marked, others = mark.read(self._page)
        certain = (
            not others and code != -signal.SIGKILL
        )  # SIGKILL is not the call's doing: the kernel or an operator sent it
        guilty = next(iter(self._pending)) if len(self._pending) == 1 else marked if certain else 0
        identified = guilty in self._pending
        bystanders = len(self._pending) - identified
        if bystanders and (more := _log_limit.due()) is not None:
            cause = "caused by one call" if identified else "the call that caused it is unknown"
            message = "%s's process ended with code %d; %s, %d calls that shared it run again%s"
            log.warning(message, self._program.noun, code, cause, bystanders, more)
        if identified:
            self._settle(pipe.Answer(id=guilty, error=f"{self._program.noun}'s process ended with code {code}"))
        elif (suspect := self._pending.pop(marked, None)) is not None and not suspect.done():
            suspect.set_exception(Killed(CONDEMNED))
            identified = True
        self._end_calls(Killed(1 if identified else UNKNOWN))

    def _settle(self, answer: pipe.Answer) -> None:
        future = self._pending.pop(answer.id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def _end_calls(self, why: Killed) -> None:
        self.gone = True
        for future in self._pending.values():
            if not future.done():
                future.set_exception(why)
        self._pending.clear()
