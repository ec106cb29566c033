"""Run episodes of the user's environment in child processes (``user_code.pool``), each in the least busy one.

An episode that raises, hangs or returns an invalid value fails, and an episode that does not end costs its process. The
other episodes of that process are repeated by the caller (``Killed``). If a process dies and the responsible episode is
unknown, all its episodes are repeated. Episodes that are repeatedly affected run alone, one at a time, until the
responsible one kills its process alone.
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
    """An episode has no result; the text gives the reason."""


class EnvironmentRunner:
    """A pool of processes that are restarted when they die. Belongs to one event loop."""

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
        """Start the processes. ``ConfigError`` if the class cannot be imported or instantiated."""
        await self._pool.start()

    async def close(self) -> None:
        """Kill the processes; running episodes fail."""
        await self._pool.close()

    @property
    def under_way(self) -> int:
        """Return the number of running episodes."""
        return self._pool.under_way

    @property
    def waiting(self) -> int:
        """Return the number of episodes that wait for a process."""
        return self._pool.waiting

    async def play(self, base_url: str, api_key: str, row: Mapping[str, Any], suspicion: int = 0) -> dict[str, float]:
        """Run one episode and return the numbers that ``rollout`` returned, by name; empty for None.

        Raise ``EpisodeFailed`` with the reason, or ``Killed`` if the process ended and the episode has to be repeated,
        with the sum of the suspicions so far. Cancellation also cancels the episode in its process.
        """
        try:
            answer = await self._pool.call(partial(_episode, base_url, api_key, dict(row)), suspicion)
        except ConfigError as error:  # the class could be instantiated when the worker started
            raise EpisodeFailed(f"{NOUN}'s process does not restart: {error}") from error
        if answer.error:
            raise EpisodeFailed(answer.error)
        return answer.columns


def _episode(base_url: str, api_key: str, row: dict[str, Any], number: int) -> pipe.Episode:
    return pipe.Episode(id=number, base_url=base_url, api_key=api_key, row=row)
