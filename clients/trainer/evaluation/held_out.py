# pyright: basic, reportMissingImports=false
"""Mean reward on held-out prompts: completions of the trainer's own model, scored by the reward of the run.

The same engine, temperature and reward process as in the run itself, so that it measures what training raises; nothing
of it changes the model or draws from the trainer's random state. Each prompt is sampled with the same random numbers
every time, so that two evaluations differ by the weights only. With an environment: ``episodes``.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from staleflow.clients.rollout.engines.base import Request, RequestError, Sampling
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine
from staleflow.clients.stage.reward import samples
from staleflow.clients.texts import tokenizer_decoder
from staleflow.clients.tokens import encoder, open_tokenizer, stop_ids
from staleflow.clients.trainer.backends.base import Stopped, Stopping
from staleflow.clients.user_code.runner import RewardFailed, RewardRunner, Sample
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Version

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
"""How often it looks whether it should stop while other processes work."""

Row = dict[str, Any]


class Evaluation(Protocol):
    """The held-out prompts of a run and what is done with them."""

    def run(self, model: Any, version: Version, stopping: Stopping) -> dict[str, float]:
        """``reward/eval`` and what belongs to it. ``Stopped`` when asked to end."""
        ...


class PromptEvaluation:
    """One completion of each prompt, all of them tokenized once."""

    def __init__(self, config: Config, directory: Path, rows: Sequence[Row]) -> None:
        self._config = config
        self._tokenizer = open_tokenizer(directory)
        self._decode = tokenizer_decoder(directory)
        self._rows = rows
        encode = encoder(self._tokenizer, chat_template=config.prompts.chat_template)
        self._prompts = [encode(row["prompt"]) for row in self._rows]

    def run(self, model: Any, version: Version, stopping: Stopping) -> dict[str, float]:
        completions = self._complete(model, stopping)
        texts = self._decode(list(completions.values()))
        calls = [samples(self._rows[index], [text])[0] for index, text in zip(completions, texts, strict=True)]
        rewards = asyncio.run(self._score(calls, stopping))
        lengths = [len(ids) for ids in completions.values()]
        return measured(version, rewards, lengths, failed=len(self._rows) - len(rewards))

    def _complete(self, model: Any, stopping: Stopping) -> dict[int, np.ndarray]:
        """The completion of each prompt, by its number; a prompt that the model cannot read has none."""
        rollout = self._config.rollout
        engine = TransformersEngine(model, stop_ids(model, self._tokenizer), slots=rollout.max_inflight)
        sampling = Sampling(max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature)
        seed = first_seed(self._config)
        asked, done = list[int](), dict[int, np.ndarray]()
        for index, prompt_ids in enumerate(self._prompts):
            try:
                engine.submit(Request(id=index, prompt_ids=prompt_ids, sampling=sampling, seed=seed + index))
                asked.append(index)
            except RequestError as error:
                log.warning("held-out prompt %d: %s", index, error)
        while len(done) < len(asked):
            if stopping():
                raise Stopped
            done.update((trajectory.id, trajectory.token_ids) for trajectory in engine.step())
        return {index: done[index] for index in asked}

    async def _score(self, calls: Sequence[Sample], stopping: Stopping) -> list[float]:
        """The rewards there are; a sample whose reward fails for good is left out and counted."""
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
    """Of the first held-out prompt; those of the others count on from it."""
    return config.seed << 32


def measured(version: Version, rewards: Sequence[float], lengths: Sequence[int], *, failed: int) -> dict[str, float]:
    """An evaluation as metrics. ``lengths``: sampled tokens of each completion there is; ``failed``: prompts without a
    reward, which are in no mean. Without any reward there is no ``reward/eval``: none is not 0."""
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
