# pyright: basic, reportMissingImports=false
"""Mean reward on held-out prompts: completions of the trainer's own model, scored by the reward of the run.

The same engine, temperature and reward process as in the run itself, so that it measures what training raises; nothing
of it changes the model or draws from the trainer's random state. Each prompt is sampled with the same random numbers
every time, so that two evaluations differ by the weights only.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.clients.rollout.engine import Request, Sampling
from staleflow.clients.rollout.tokens import encoder, open_tokenizer, stop_ids
from staleflow.clients.rollout.transformers_engine import TransformersEngine
from staleflow.clients.stage.reward import samples
from staleflow.clients.stage.runner import RewardFailed, RewardRunner, Sample
from staleflow.clients.stage.texts import tokenizer_decoder
from staleflow.clients.trainer.backend import Stopped, Stopping
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Version
from staleflow.runtime.prompts import PromptRows, open_eval_prompts

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often scoring looks whether it should stop."""


class Evaluation:
    """The held-out prompts of a run, tokenized once."""

    def __init__(self, config: Config, directory: Path, held_out: PromptRows) -> None:
        self._config = config
        self._tokenizer = open_tokenizer(directory)
        self._decode = tokenizer_decoder(directory)
        self._rows = [held_out[row] for row in range(min(len(held_out), config.trainer.eval_prompts))]
        encode = encoder(self._tokenizer, chat_template=config.prompts.chat_template)
        self._prompts = [encode(row["prompt"]) for row in self._rows]

    def run(self, model: Any, version: Version, stopping: Stopping) -> dict[str, float]:
        """``reward/eval`` and what belongs to it. ``Stopped`` when asked to end."""
        return self.score(self.complete(model, stopping), version, stopping)

    def score(self, completions: list[np.ndarray], version: Version, stopping: Stopping) -> dict[str, float]:
        """The second half of ``run``."""
        texts = self._decode(completions)
        calls = [samples(row, [text])[0] for row, text in zip(self._rows, texts, strict=True)]
        rewards = asyncio.run(self._score(calls, stopping))
        values = {
            "reward/eval": float(np.mean(rewards)) if rewards else 0.0,
            "length/eval": float(np.mean([len(ids) for ids in completions])),
        }
        if failed := len(calls) - len(rewards):
            values["reward/eval_failed"] = float(failed)
        log.info("version %d: reward/eval %.3f over %d prompts", version, values["reward/eval"], len(rewards))
        return values

    def complete(self, model: Any, stopping: Stopping) -> list[np.ndarray]:
        """The first half of ``run``. Ranks that hold a model together do it at once; all of them stop, or none."""
        rollout = self._config.rollout
        engine = TransformersEngine(model, stop_ids(model, self._tokenizer), slots=rollout.max_inflight)
        sampling = Sampling(max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature)
        seed = self._config.seed << 32
        for index, prompt_ids in enumerate(self._prompts):
            engine.submit(Request(id=index, prompt_ids=prompt_ids, sampling=sampling, seed=seed + index))
        done: dict[int, np.ndarray] = {}
        while len(done) < len(self._prompts):
            if stopping():
                raise Stopped
            done.update((trajectory.id, trajectory.token_ids) for trajectory in engine.step())
        return [done[index] for index in range(len(self._prompts))]

    async def _score(self, calls: Sequence[Sample], stopping: Stopping) -> list[float]:
        """The rewards there are; a sample whose reward fails for good is left out and counted."""
        reward = self._config.reward
        runner = RewardRunner(reward.run, timeout_s=reward.timeout_s, retries=reward.retries)
        scoring: list[asyncio.Task[float]] = []
        try:
            await runner.start()
            scoring = [asyncio.create_task(runner.score_one(call)) for call in calls]
            while left := [task for task in scoring if not task.done()]:
                if stopping():
                    raise Stopped
                await asyncio.wait(left, timeout=LOOK_S, return_when=asyncio.ALL_COMPLETED)
            results = await asyncio.gather(*scoring, return_exceptions=True)
        finally:
            for task in scoring:
                task.cancel()
            await runner.close()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RewardFailed):
                raise result
        return [result for result in results if isinstance(result, float)]


def open_evaluation(config: Config, directory: Path) -> Evaluation | None:
    """The evaluation of a run; None when it has no held-out prompts, or wants none."""
    held_out = open_eval_prompts(config.prompts, seed=config.seed) if config.trainer.eval_prompts else None
    return None if held_out is None else Evaluation(config, directory, held_out)
