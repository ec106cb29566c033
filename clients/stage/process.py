"""A process of user code, its pipe, and the calls under way in it.

Nothing that user code does reaches the worker but an answer or the end of the pipe: a call that raises is answered with
the reason, one that hangs costs the process, and so does one that will not be cancelled. The process is of lower rank
than its worker: the kernel ends it first when memory runs out, and it dies with its worker, with all that it started.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO

import msgspec

from staleflow.clients.stage import pipe
from staleflow.clients.stage.child import took_too_long
from staleflow.configs.errors import ConfigError

log = logging.getLogger(__name__)

IMPORT_TIMEOUT_S = 120.0
"""A module may load a model of its own."""
GRACE_S = 1.0
"""A child that serves calls side by side ends overdue ones by itself; only long after that is it taken to hang."""
CANCEL_S = 2.0
"""A cancelled call that goes on for longer costs its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What such a process runs, and what it is called in messages to the operator."""

    module: str
    key: str
    """Of the configuration, that names the user's code."""
    noun: str
    load: pipe.Load
    cancels: bool = False
    """Whether a call that nobody waits for any more is cancelled in the process too."""


class Killed(Exception):
    """The process was ended because of another call."""


class UserProcess:
    """A started process. Belongs to one event loop."""

    def __init__(self, process: asyncio.subprocess.Process, lifeline: FileIO, program: Program) -> None:
        self._process = process
        self._lifeline = lifeline
        self._program = program
        self._timeout_s = program.load.timeout_s
        self._pending: dict[int, asyncio.Future[pipe.Answer]] = {}
        self._last_id = 0
        self._reading: asyncio.Task[None] | None = None
        self._letting_go: set[asyncio.Task[None]] = set()
        self.concurrent = False
        self.gone = False

    @classmethod
    async def start(cls, program: Program) -> "UserProcess":
        """A process that has loaded the user's code; ``ConfigError`` names what is wrong with that."""
        its_end, ours = os.pipe()
        lifeline = FileIO(ours, "wb")
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", program.module, str(its_end)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(its_end,),
                start_new_session=True,
            )
        except BaseException:
            lifeline.close()
            raise
        finally:
            os.close(its_end)
        child = cls(process, lifeline, program)
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
        child.concurrent = answer.concurrent
        child._reading = asyncio.create_task(child._read_answers())
        return child

    async def call(self, make: Callable[[int], pipe.Call | pipe.GroupCall | pipe.Episode]) -> pipe.Answer:
        """The child's answer to the call that ``make`` makes of a number, or one that says that it hung or died.

        ``Killed`` when another call's fault ends the process.
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
                letting_go = asyncio.create_task(self._let_go(call.id))
                self._letting_go.add(letting_go)
                letting_go.add_done_callback(self._letting_go.discard)
            raise
        finally:
            self._pending.pop(call.id, None)

    async def _let_go(self, call: int) -> None:
        """Have a call cancelled; kill the process if it goes on all the same."""
        future: asyncio.Future[pipe.Answer] = asyncio.get_running_loop().create_future()
        self._pending[call] = future
        try:
            async with asyncio.timeout(CANCEL_S):
                await self._send(pipe.Cancel(id=call))
                await future
        except TimeoutError:
            log.warning("%s went on for %g s after its end: its process is killed", self._program.noun, CANCEL_S)
            self._pending.pop(call, None)
            self._end_calls(Killed())
            await self.kill()
        except Killed:
            pass
        finally:
            self._pending.pop(call, None)

    async def kill(self) -> None:
        """End the process, and those it started, whatever it does."""
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
        with contextlib.suppress(ConnectionError):  # its end shows at the other pipe
            self._process.stdin.write(pipe.frame(message))
            await self._process.stdin.drain()

    async def _receive(self) -> pipe.FromChild | None:
        assert self._process.stdout is not None
        try:
            (length,) = pipe.LENGTH.unpack(await self._process.stdout.readexactly(pipe.LENGTH.size))
            return pipe.from_child.decode(await self._process.stdout.readexactly(min(length, pipe.MAX_FRAME)))
        except (asyncio.IncompleteReadError, msgspec.DecodeError):  # ended, or user code wrote into the pipe
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
        for call in list(self._pending):
            self._settle(pipe.Answer(id=call, error=f"{self._program.noun}'s process ended with code {code}"))

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
