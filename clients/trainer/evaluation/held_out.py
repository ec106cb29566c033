# pyright: basic, reportMissingImports=false
"""Mean reward on held-out prompts: completions of the trainer's own model, scored by the reward of the run.

Engine, sampling and reward process are those of the run, so that the metric is what training optimizes. Evaluation
changes neither the model nor the trainer's random state. Each prompt uses the same random numbers every time, so that
two evaluations differ only by the weights. For runs with an environment see ``episodes``.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from staleflow.clients.prompts import prompt_of
from staleflow.clients.rollout.engines.base import Request, RequestError, Sampling, Trajectory
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine
from staleflow.clients.stage.reward import facts, samples
from staleflow.clients.texts import tokenizer_decoder
from staleflow.clients.tokens import encoder, open_tokenizer, stop_ids
from staleflow.clients.trainer.backends.base import Stopped, Stopping
from staleflow.clients.user_code.rewards import RewardFailed, RewardRunner, Sample
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Version

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
"""Interval between checks for a stop request while other processes work."""

Row = dict[str, Any]


class Evaluation(Protocol):
    """The held-out prompts of a run and their evaluation."""

    def run(self, model: Any, version: Version, stopping: Stopping) -> dict[str, float]:
        """Return ``reward/eval`` and its companion metrics. ``Stopped`` on a stop request."""
        ...


class PromptEvaluation:
    """One completion per prompt; the prompts are tokenized once."""

    def __init__(self, config: Config, directory: Path, rows: Sequence[Row]) -> None:
        self._config = config
        self._tokenizer = open_tokenizer(directory)
        self._decode = tokenizer_decoder(directory)
        self._rows = rows
        prompts = config.prompts
        encode = encoder(self._tokenizer, chat_template=prompts.chat_template, system=prompts.system)
        self._prompts = [encode(prompt_of(row)) for row in self._rows]

    def run(self, model: Any, version: Version, stopping: Stopping) -> dict[str, float]:
        completions = self._complete(model, stopping)
        texts = self._decode([trajectory.token_ids for trajectory in completions.values()])
        calls = [
            samples(self._rows[index], [text], known=[facts(trajectory.token_ids, trajectory.finish)])[0]
            for (index, trajectory), text in zip(completions.items(), texts, strict=True)
        ]
        rewards = asyncio.run(self._score(calls, stopping))
        lengths = [len(trajectory.token_ids) for trajectory in completions.values()]
        return evaluation_metrics(version, rewards, lengths, failed=len(self._rows) - len(rewards))

    def _complete(self, model: Any, stopping: Stopping) -> dict[int, Trajectory]:
        """Return the completion of each prompt by its number, without prompts that the model cannot read."""
        rollout = self._config.rollout
        stops = stop_ids(model, self._tokenizer)
        slots = min(rollout.max_inflight, max(len(self._prompts), 1))  # each slot allocates a row of the KV cache
        engine = TransformersEngine(model, stops, decode=self._decode, slots=slots)
        sampling = Sampling.of(rollout)
        seed = first_seed(self._config)
        submitted, finished = list[int](), dict[int, Trajectory]()
        for index, prompt_ids in enumerate(self._prompts):
            try:
                engine.submit(Request(id=index, prompt_ids=prompt_ids, sampling=sampling, seed=seed + index))
                submitted.append(index)
            except RequestError as error:
                log.warning("held-out prompt %d: %s", index, error)
        while len(finished) < len(submitted):
            if stopping():
                raise Stopped
            finished.update((trajectory.id, trajectory) for trajectory in engine.step())
        return {index: finished[index] for index in submitted}

    async def _score(self, calls: Sequence[Sample], stopping: Stopping) -> list[float]:
        """Return the available rewards; a sample whose reward fails permanently is left out and counted."""
        runner = RewardRunner.of(self._config.reward)
        scoring: list[asyncio.Task[float]] = []
        try:
            await runner.start()
            scoring = [asyncio.create_task(runner.score_one(call)) for call in calls]
            while left := [task for task in scoring if not task.done()]:
                if stopping():
                    raise Stopped
                await asyncio.wait(left, timeout=POLL_INTERVAL_S, return_when=asyncio.ALL_COMPLETED)
            results = await asyncio.gather(*scoring, return_exceptions=True)
        finally:
            for task in scoring:
                task.cancel()
            await runner.close()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RewardFailed):
                raise result
        return [result for result in results if isinstance(result, float)]


def first_seed(config: Config) -> int:
    """Return the seed of the first held-out prompt; the others count up from it."""
    return config.seed << 32


def evaluation_metrics(
    version: Version, rewards: Sequence[float], lengths: Sequence[int], *, failed: int
) -> dict[str, float]:
    """Return the metrics of an evaluation.

    ``lengths``: sampled tokens of each completion. ``failed``: number of prompts without a reward, which enter no mean.
    Without any reward, ``reward/eval`` is omitted rather than 0.
    """
    values: dict[str, float] = {}
    if rewards:
        values["reward/eval"] = float(np.mean(rewards))
        log.info("version %d: reward/eval %.3f over %d prompts", version, values["reward/eval"], len(rewards))
    if lengths:
        values["length/eval"] = float(np.mean(lengths))
    if failed:
        values["reward/eval_failed"] = float(failed)
        log.error("version %d: %d of %d held-out prompts have no reward", version, failed, failed + len(rewards))
    return values
