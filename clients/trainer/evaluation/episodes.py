# pyright: basic, reportMissingImports=false
"""Evaluation on held-out prompts in a run with an environment: one episode each, against the trainer's own model.

All parts are the rollout worker's: the environment's processes, its client and chat server, and the engine in a thread.
Each evaluation starts the processes and ends them afterwards. Episodes that raise, hang or return an invalid value, and
those without a reward, are left out and counted. An engine failure ends the evaluation with its error. In every case
the thread has released the model before ``run`` returns.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine
from staleflow.clients.rollout.episodes.chat.tokenizer import TokenizerChatTemplate
from staleflow.clients.rollout.episodes.env_runner import EpisodeFailed
from staleflow.clients.rollout.episodes.environment import Environments
from staleflow.clients.rollout.groups import Recipe
from staleflow.clients.stage.reward import COLUMN, RewardStage, reward_stage
from staleflow.clients.stage.worker import Failed, StageGroup
from staleflow.clients.texts import tokenizer_decoder
from staleflow.clients.tokens import open_tokenizer, stop_ids
from staleflow.clients.trainer.backends.base import Stopped, Stopping
from staleflow.clients.trainer.evaluation.held_out import POLL_INTERVAL_S, Row, evaluation_metrics, first_seed
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import GroupId, Version

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """A finished episode."""

    tokens: int
    """Number of sampled tokens over all turns."""
    reward: float | None
    """None if neither the environment nor ``reward.run`` returned one."""


class EpisodeEvaluation:
    """An ``Evaluation`` whose completions come from episodes of the environment."""

    def __init__(self, config: Config, directory: Path, rows: Sequence[Row]) -> None:
        self._config = config
        self._tokenizer = open_tokenizer(directory)
        self._decode = tokenizer_decoder(directory)
        self._rows = rows

    def run(self, model: Any, version: Version, stopping: Stopping) -> dict[str, float]:
        played = [one for one in asyncio.run(self._run(model, stopping)) if one is not None]
        rewards = [one.reward for one in played if one.reward is not None]
        return evaluation_metrics(
            version, rewards, [one.tokens for one in played], failed=len(self._rows) - len(rewards)
        )

    async def _run(self, model: Any, stopping: Stopping) -> list[PlayedEpisode | None]:
        config, stops = self._config, stop_ids(model, self._tokenizer)
        slots = min(config.rollout.max_inflight, max(len(self._rows), 1))  # each allocates a row of the KV cache
        engine = EngineThread(TransformersEngine(model, stops, decode=self._decode, slots=slots))
        environments = Environments(config, engine, TokenizerChatTemplate(self._tokenizer), Recipe.of(config))
        try:
            await environments.start()
            async with reward_stage(config.reward, self._decode) as reward:
                return await self._all(environments, reward, engine.failure, stopping)
        finally:
            await environments.close()
            await engine.close(limit_s=None)

    async def _all(
        self, environments: Environments, reward: RewardStage, failure: "asyncio.Future[None]", stopping: Stopping
    ) -> list[PlayedEpisode | None]:
        """Play one episode per row, as many concurrently as the engine decodes."""
        places = asyncio.Semaphore(self._config.rollout.max_inflight)

        async def play(number: int) -> PlayedEpisode | None:
            async with places:
                return await self._play(environments, reward, number)

        playing = [asyncio.create_task(play(number)) for number in range(len(self._rows))]
        try:
            while True:
                if stopping():
                    raise Stopped
                if failure.done() and (error := failure.exception()) is not None:
                    raise error.__cause__ or error
                if not (left := [task for task in playing if not task.done()]):
                    return [task.result() for task in playing]
                await asyncio.wait(left, timeout=POLL_INTERVAL_S)
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def _play(self, environments: Environments, reward: RewardStage, number: int) -> PlayedEpisode | None:
        """Play the episode of a row; return None if it failed."""
        row = self._rows[number]
        try:
            payload = await environments.episode(row, first_seed(self._config) + number)
        except EpisodeFailed as error:
            log.warning("held-out prompt %d: %s", number, error)
            return None
        tokens = int(payload.loss_mask.sum())
        (columns,) = await reward.make([StageGroup(group=GroupId(number), row=row, payload=payload)])
        if isinstance(columns, Failed):
            log.warning("held-out prompt %d: %s", number, columns.why)
            return PlayedEpisode(tokens, None)
        return PlayedEpisode(tokens, float(columns[COLUMN][0]))
