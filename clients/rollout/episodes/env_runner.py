"""Plays episodes of the user's environment in child processes (``stage.pool``), each in the least busy one.

An episode that raises, hangs or returns nonsense has failed, and one that will not end costs its process. Episodes that
were merely beside it are played again by the caller (``Killed``). When a process dies and which episode ended it cannot
be known, all are played again; those that this happens to repeatedly play alone, one at a time, until the guilty one
dies alone.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from staleflow.clients.rollout.episodes.env_child import KEY, NOUN
from staleflow.clients.user_code import pipe
from staleflow.clients.user_code.pool import Pool
from staleflow.clients.user_code.process import Program
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
        module = "staleflow.clients.rollout.episodes.env_child"
        program = Program(module=module, key=KEY, noun=NOUN, load=load, cancels=True)
        self._pool = Pool(program, processes=settings.processes, concurrency=settings.concurrency)

    async def start(self) -> None:
        """Start the processes. ``ConfigError`` when the class cannot be imported or made."""
        await self._pool.start()

    async def close(self) -> None:
        """Kill the processes; episodes under way fail."""
        await self._pool.close()

    @property
    def under_way(self) -> int:
        """Episodes that play."""
        return self._pool.under_way

    @property
    def waiting(self) -> int:
        """Episodes that wait for a process."""
        return self._pool.waiting

    async def play(self, base_url: str, api_key: str, row: Mapping[str, Any], suspicion: int = 0) -> dict[str, float]:
        """The numbers that ``rollout`` returned, by name; empty for None.

        ``EpisodeFailed`` with the reason; ``Killed`` when the process ended and this episode has to be played again,
        with the sum of the suspicions so far. Cancelled, the episode is cancelled in its process too.
        """
        try:
            answer = await self._pool.call(partial(_episode, base_url, api_key, dict(row)), suspicion)
        except ConfigError as error:  # it could be made when the worker started
            raise EpisodeFailed(f"{NOUN}'s process does not start again: {error}") from error
        if answer.error:
            raise EpisodeFailed(answer.error)
        return answer.columns


def _episode(base_url: str, api_key: str, row: dict[str, Any], number: int) -> pipe.Episode:
    return pipe.Episode(id=number, base_url=base_url, api_key=api_key, row=row)
