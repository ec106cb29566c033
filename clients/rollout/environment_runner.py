"""Plays episodes of the user's environment in child processes (``stage.process``), each in the least busy one.

An episode that raises, hangs or returns nonsense has failed, and one that will not end costs its process. Episodes that
were merely beside it are played anew by the caller (``Killed``); when a process dies and nobody can say by whose fault,
all of its episodes have failed.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from staleflow.clients.rollout.environment_child import KEY, NOUN
from staleflow.clients.stage import pipe
from staleflow.clients.stage.process import Program, UserProcess
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Environment


class EpisodeFailed(Exception):
    """An episode has no result; the text says why."""


class EnvironmentRunner:
    """Some processes, started again as they die. Belongs to one event loop."""

    def __init__(self, settings: Environment) -> None:
        load = pipe.Load(
            run=settings.run,
            timeout_s=settings.timeout_s,
            options=settings.options,
            memory_mb=settings.memory_mb,
        )
        module = "staleflow.clients.rollout.environment_child"
        self._program = Program(module=module, key=KEY, noun=NOUN, load=load, cancels=True)
        self._processes: list[UserProcess | None] = [None] * settings.processes
        self._busy = [0] * settings.processes
        """Episodes of each process."""
        self._starting = [asyncio.Lock() for _ in self._processes]

    async def start(self) -> None:
        """Start the processes. ``ConfigError`` when the class cannot be imported or made."""
        await asyncio.gather(*(self._living(place) for place in range(len(self._processes))))

    async def close(self) -> None:
        """Kill the processes; episodes under way fail."""
        await asyncio.gather(*(process.kill() for process in self._processes if process is not None))

    async def play(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> dict[str, float]:
        """The numbers that ``rollout`` returned, by name; empty for None.

        ``EpisodeFailed`` with the reason; ``Killed`` when another episode's fault ended the process. Cancelled, the
        episode is cancelled in its process too.
        """
        place = min(range(len(self._processes)), key=self._busy.__getitem__)
        self._busy[place] += 1
        try:
            process = await self._living(place)
            answer = await process.call(partial(_episode, base_url, api_key, dict(row)))
        except ConfigError as error:  # it could be made when the worker started
            raise EpisodeFailed(f"{NOUN}'s process does not start again: {error}") from error
        finally:
            self._busy[place] -= 1
        if answer.error:
            raise EpisodeFailed(answer.error)
        return answer.columns

    async def _living(self, place: int) -> UserProcess:
        async with self._starting[place]:
            process = self._processes[place]
            if process is None or process.gone:
                process = self._processes[place] = await UserProcess.start(self._program)
            return process


def _episode(base_url: str, api_key: str, row: dict[str, Any], number: int) -> pipe.Episode:
    return pipe.Episode(id=number, base_url=base_url, api_key=api_key, row=row)
