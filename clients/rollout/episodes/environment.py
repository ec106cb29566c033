"""Groups whose trajectories are episodes of user code: ``groups.produce`` with an environment in between.

One sample is one episode, and the episodes of a group run concurrently. An episode's calls arrive through the
``ChatServer`` (``episode.py`` serves them). An error of the environment costs only its group.

- interrupt: the current turn ends with its tokens so far and is answered. The next call is rejected
  (``episode_over``), and the environment has ``RETURN_TIMEOUT_S`` to return. An episode without tokens generates at
  least one. Numbers that it did not return are 0 if other episodes of its group returned them.
- abort: the current turn is aborted and the episode is cancelled in its process.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import AsyncEngine, Sampling
from staleflow.clients.rollout.episodes.chat.server import ChatServer
from staleflow.clients.rollout.episodes.chat.template import ChatTemplate
from staleflow.clients.rollout.episodes.chat.transcript import Transcript, group_payload
from staleflow.clients.rollout.episodes.env_child import REWARD
from staleflow.clients.rollout.episodes.env_runner import EnvironmentRunner, EpisodeFailed
from staleflow.clients.rollout.episodes.episode import Episode
from staleflow.clients.rollout.groups import ActiveLease, Recipe, first_ended
from staleflow.clients.user_code.process import Killed
from staleflow.configs.rewards import components
from staleflow.configs.schema import Config
from staleflow.configs.schema import Environment as Settings
from staleflow.protocols.wire.stages import ENVIRONMENT
from staleflow.protocols.wire.trajectory import GroupPayload

RETURN_TIMEOUT_S = 5.0
"""Time between an interrupt and the forced end of an episode that does not return."""


class Environments:
    """Everything that lets an environment generate groups with an engine. Create it inside a running event loop."""

    def __init__(self, config: Config, engine: AsyncEngine, template: ChatTemplate, recipe: Recipe) -> None:
        self._engine = engine
        self._template = template
        self._recipe = recipe
        self._settings = config.environment
        self._rewarded = bool(components(config.reward))
        self._runner = EnvironmentRunner(config.environment)
        self._server = ChatServer(self._settings.host, self._settings.port, self._settings.advertise)

    async def start(self) -> None:
        """Start the processes and the server. ``ConfigError`` if the class cannot be imported or instantiated."""
        await self._runner.start()
        await self._server.start()

    async def close(self) -> None:
        await self._runner.close()
        await self._server.close()

    @property
    def under_way(self) -> int:
        """Return the number of running episodes."""
        return self._runner.under_way

    @property
    def waiting(self) -> int:
        """Return the number of episodes that wait for a process."""
        return self._runner.waiting

    async def produce(self, active: ActiveLease, row: Mapping[str, Any]) -> GroupPayload:
        """Return the group's first ``group_size`` episodes to end. ``EpisodeFailed`` if one of them has no result."""
        recipe, playing = self._recipe, dict[int, Episode]()

        def interrupt() -> None:
            for episode in playing.values():
                episode.interrupt()

        active.on_interrupt = interrupt

        async def play(sample: int) -> tuple[int, dict[str, float]]:
            def opened(episode: Episode) -> None:
                playing[sample] = episode
                if active.interrupted:
                    episode.interrupt()

            return sample, await self._play(row, recipe.sample_seed(active.assign, sample), opened)

        tasks = [asyncio.ensure_future(play(sample)) for sample in range(recipe.started)]
        done = sorted(await first_ended(tasks, recipe.group_size), key=lambda ended: ended[0])
        transcripts = [playing[sample].transcript for sample, _ in done]
        returned = self._columns(transcripts, [columns for _, columns in done])
        return group_payload(transcripts, returned, recipe.columns)

    async def episode(self, row: Mapping[str, Any], seed: int) -> GroupPayload:
        """Run one episode without a lease, as a group of one sample. ``EpisodeFailed`` if it has no result."""
        opened: list[Episode] = []
        columns = await self._play(row, seed, opened.append)
        transcripts = [opened[-1].transcript]
        return group_payload(transcripts, self._columns(transcripts, [columns]))

    async def episodes(
        self, row: Mapping[str, Any], seeds: Sequence[int], sampling: Sampling, places: asyncio.Semaphore
    ) -> tuple[GroupPayload, list[str]]:
        """Run one episode for each seed without a lease, each in one of ``places``. Return those that have a result,
        and the reasons of the others. ``EpisodeFailed`` if none has.

        Calls are sampled with ``sampling``, whatever they request: the policy of ``environment.sampling_arguments`` is
        about training.
        """
        settings = msgspec.structs.replace(self._settings, sampling_arguments="override")

        async def play(seed: int) -> tuple[Transcript, dict[str, float]]:
            opened: list[Episode] = []
            async with places:
                columns = await self._play(row, seed, opened.append, sampling, settings)
            return opened[-1].transcript, columns

        ended = await asyncio.gather(*map(play, seeds), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, EpisodeFailed):
                raise error
        played = [one for one in ended if not isinstance(one, BaseException)]
        failures = [str(one) for one in ended if isinstance(one, EpisodeFailed)]
        if not played:
            raise EpisodeFailed(failures[0])
        transcripts = [transcript for transcript, _ in played]
        return group_payload(transcripts, self._columns(transcripts, [columns for _, columns in played])), failures

    async def _play(
        self,
        row: Mapping[str, Any],
        seed: int,
        opened: Callable[[Episode], None],
        sampling: Sampling | None = None,
        settings: Settings | None = None,
    ) -> dict[str, float]:
        """Return the result of ``rollout`` for one episode. ``sampling`` and ``settings``: default those of the run.

        ``opened`` receives the episode, and again after another episode killed the process. The repetition starts
        over with the same seed. The engine has counted the tokens of the lost run, but no group has them: they show
        as generated and not trained.
        """
        suspicion = 0
        while True:
            chosen = sampling or self._recipe.sampling
            episode = Episode(self._engine, self._template, chosen, seed=seed, settings=settings or self._settings)
            opened(episode)
            try:
                return await self._played(episode, row, suspicion)
            except Killed as killed:
                if episode.over.is_set():  # it has its tokens; only the environment's return value is missing
                    return {}
                suspicion += killed.suspicion

    async def _played(self, episode: Episode, row: Mapping[str, Any], suspicion: int) -> dict[str, float]:
        key = self._server.open(episode.answer)
        rollout = asyncio.ensure_future(self._runner.play(self._server.base_url, key, row, suspicion))
        over = asyncio.ensure_future(episode.over.wait())
        try:
            await asyncio.wait((rollout, over), return_when=asyncio.FIRST_COMPLETED)
            if not rollout.done():
                await asyncio.wait((rollout,), timeout=RETURN_TIMEOUT_S)
            columns = rollout.result() if rollout.done() else {}
        except EpisodeFailed:
            if not episode.over.is_set():
                raise
            columns = {}  # after an interrupt the environment does not have to return anything
        finally:
            self._server.end(key)
            episode.close()
            for task in (rollout, over):
                task.cancel()
            await asyncio.gather(rollout, over, return_exceptions=True)
        if not episode.transcript.turns:
            raise EpisodeFailed("the environment returned before its first answer; there is nothing to train")
        return columns

    def _columns(
        self, transcripts: Sequence[Transcript], returned: Sequence[dict[str, float]]
    ) -> dict[str, NDArray[np.float32]]:
        """Return the episodes' results as stage columns [n], with the same names for all samples."""
        whole = [columns for t, columns in zip(transcripts, returned, strict=True) if columns or not t.interrupted]
        names = set(whole[0]) if whole else set[str]()
        if any(set(columns) != names for columns in whole):
            returned_names = " and ".join(sorted({", ".join(sorted(columns)) or "None" for columns in whole}))
            raise EpisodeFailed(
                f"the environment must return the same for all samples of a group; it returned {returned_names}"
            )
        if not self._rewarded and REWARD not in names:
            if whole:
                raise EpisodeFailed("the environment returned no reward, and there is no reward.run")
            names = {REWARD}
        return {
            f"{ENVIRONMENT}{name}": np.array([columns.get(name, 0.0) for columns in returned], np.float32)
            for name in sorted(names)
        }
