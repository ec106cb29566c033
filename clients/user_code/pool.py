"""Pool of processes of user code, each with several concurrent calls; processes that die are replaced.

- A call that ends its process also ends the calls that share it. Those run again; the more calls share a process, the
  fewer of them finish. So the pool lets fewer calls share a process while calls end processes, and more again
  afterwards.
- A call that was killed too often runs in a process of its own, so that a crash there is certainly its own fault.
- After the first crash, one spare process is kept ready: starting one takes as long as many calls.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from staleflow.clients.user_code import pipe
from staleflow.clients.user_code.process import CONDEMNED, Program, UserProcess

Make = Callable[[int], pipe.AnyCall]

WINDOW = 32
"""Number of calls over which the share of crashes is measured."""
MAX_EXPECTED_CRASHES = 0.5
"""Maximum expected number of crashes of its process during one call. With 1, only 37 % (1/e) of the calls would
finish."""


class Pool:
    """Pool of processes. Owned by one event loop. ``concurrency``: maximum number of concurrent calls in one
    process."""

    def __init__(self, program: Program, *, processes: int, concurrency: int) -> None:
        self._program = program
        self._concurrency = concurrency
        self._processes: list[UserProcess | None] = [None] * processes
        self._busy = [0] * processes
        """Number of calls in each process."""
        self._starting = [asyncio.Lock() for _ in self._processes]
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._crashing = 0.0
        """Moving average of the share of calls that ended their process."""
        self._spare: asyncio.Task[UserProcess] | None = None
        self._alone = asyncio.Lock()
        self._lone: UserProcess | None = None
        self._lonely = 0
        """Number of calls in the process of their own, or waiting for it."""

    async def start(self) -> None:
        """Start the processes. Raise ``ConfigError`` if the user's code cannot be loaded."""
        started = await asyncio.gather(*(self._living(place) for place in range(len(self._processes))))
        if not started[0].concurrent:
            self._concurrency = 1

    async def takes_lists(self) -> bool:
        """Return whether the function takes lists. Raise ``ConfigError`` if it cannot be loaded."""
        return (await self._living(0)).lists

    async def close(self) -> None:
        """Kill the processes; calls in progress fail."""
        living = [process for process in (*self._processes, self._lone) if process is not None]
        if self._spare is not None:
            self._spare.cancel()
            (spare,) = await asyncio.gather(self._spare, return_exceptions=True)
            living += [spare] if isinstance(spare, UserProcess) else []
        await asyncio.gather(*(process.kill() for process in living))

    @property
    def calls(self) -> int:
        """Maximum number of concurrent calls in one process; known once it has started."""
        return self._concurrency

    @property
    def under_way(self) -> int:
        """Number of calls in the shared processes."""
        return sum(self._busy)

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a place."""
        return sum(not turn.done() for turn in self._waiting)

    @property
    def limit(self) -> int:
        """Number of calls that may currently share a process."""
        if self._crashing * self._concurrency <= MAX_EXPECTED_CRASHES:
            return self._concurrency
        return max(1, int(MAX_EXPECTED_CRASHES / self._crashing))

    async def call(self, make: Make, suspicion: int = 0) -> pipe.Answer:
        """Run the call that ``make`` builds from a number and return its answer.

        Raise ``Killed`` if it must run again; the caller sums up the suspicion. Raise ``ConfigError`` if a process
        cannot be restarted.
        """
        if suspicion >= CONDEMNED:
            return await self._call_alone(make)
        place = await self._enter()
        try:
            process = await self._living(place)
            answer = await process.call(make)
            if not process.gone:
                self._ended(crashed=False)
            return answer
        finally:
            self._leave(place)

    async def _call_alone(self, make: Make) -> pipe.Answer:
        self._lonely += 1
        try:
            async with self._alone:
                if self._lone is None or self._lone.gone:
                    self._lone = await UserProcess.start(self._program)
                try:
                    return await self._lone.call(make)
                except asyncio.CancelledError:  # it may still be running there, and the next call must be alone
                    await self._lone.kill()
                    raise
        finally:
            self._lonely -= 1
            if not self._lonely and self._lone is not None:
                process, self._lone = self._lone, None
                await process.kill()

    async def _enter(self) -> int:
        """Wait for a place in the least busy process, first come, first served."""
        if not self._waiting and (place := self._free()) is not None:
            self._busy[place] += 1
            return place
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(turn.result())
            raise

    def _leave(self, place: int) -> None:
        self._busy[place] -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (place := self._free()) is not None:
            turn = self._waiting.popleft()
            if not turn.done():
                self._busy[place] += 1
                turn.set_result(place)

    def _free(self) -> int | None:
        place = min(range(len(self._busy)), key=self._busy.__getitem__)
        return place if self._busy[place] < self.limit else None

    def _ended(self, *, crashed: bool) -> None:
        self._crashing += (crashed - self._crashing) / WINDOW

    async def _living(self, place: int) -> UserProcess:
        async with self._starting[place]:
            process = self._processes[place]
            if process is None:
                process = self._processes[place] = await UserProcess.start(self._program)
            elif process.gone:
                self._ended(crashed=True)
                process = self._processes[place] = await self._next()
            return process

    async def _next(self) -> UserProcess:
        """Return the spare process, or a new one, and start another spare."""
        spare, self._spare = self._spare, None
        process = await UserProcess.start(self._program) if spare is None else await spare
        if self._spare is None:  # unless another place has started one in the meantime
            self._spare = asyncio.create_task(UserProcess.start(self._program))
        return await self._next() if process.gone else process
