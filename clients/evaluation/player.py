"""Play the prompts of an evaluation set with an engine, or with environments that call it, and score the samples.

Each sample has the same seed in every evaluation of its set, so that two evaluations differ only by the weights. A
sample that other weights than the pinned ones wrote raises ``OtherVersion``, and the caller plays its prompt again.
"""

import asyncio
import logging
import zlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import numpy as np

from staleflow.clients.evaluation.scorer import Scorer
from staleflow.clients.prompts import Encode, prompt_of
from staleflow.clients.rollout.engines.base import AsyncEngine, Request, RequestError, Sampling, Trajectory
from staleflow.clients.rollout.episodes.env_runner import EpisodeFailed
from staleflow.clients.rollout.episodes.environment import Environments
from staleflow.clients.rollout.groups import payload as columns_of
from staleflow.clients.rollout.groups import request_id
from staleflow.clients.stage.worker import Failed
from staleflow.configs.evals import EvalSet
from staleflow.configs.schema import Config, Rollout
from staleflow.process.rate_limited_log import RateLimitedLog
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.messages.evaluation import PromptScores
from staleflow.protocols.wire.trajectory import Finish, GroupPayload

log = logging.getLogger(__name__)

Weights = tuple[Lineage, Version]


class OtherVersion(Exception):
    """Weights other than the pinned ones wrote a token."""


def sampling_of(given: EvalSet, rollout: Rollout) -> Sampling:
    """Return the sampling parameters of a set."""
    return Sampling(
        max_new_tokens=given.max_new_tokens or rollout.max_new_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        repetition_penalty=rollout.repetition_penalty,
        frequency_penalty=rollout.frequency_penalty,
        presence_penalty=rollout.presence_penalty,
        stop=tuple(rollout.stop),
    )


def sample_seed(seed: int, name: str, prompt: int, sample: int) -> int:
    """Return the seed of a sample of the set ``name``, in a run with this ``seed``."""
    entropy = (seed, zlib.crc32(name.encode()), prompt, sample)
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


def check_version(payload: GroupPayload, pinned: Weights) -> None:
    """Raise ``OtherVersion`` unless the pinned weights wrote every token."""
    written = {(Lineage(int(row[1])), Version(int(row[2]))) for row in payload.segments}
    if not written <= {pinned}:
        versions = ", ".join(str(version) for _, version in sorted(written))
        raise OtherVersion(f"version {pinned[1]} is pinned; versions {versions} wrote a sample")


class SetPlayer:
    """Plays prompts of one set. Belongs to one event loop."""

    def __init__(
        self,
        config: Config,
        given: EvalSet,
        rows: Sequence[dict[str, Any]],
        *,
        engine: AsyncEngine,
        encode: Encode,
        environments: Environments | None,
        scorer: Scorer,
        pinned: Weights | None = None,
    ) -> None:
        """``pinned``: weights that must write every token; None: the ones that the engine started with."""
        self._config = config
        self._given = given
        self._rows = rows
        self._engine = engine
        self._encode = encode
        self._environments = environments
        self._scorer = scorer
        self._pinned = pinned
        self._sampling = sampling_of(given, config.rollout)
        self._places = asyncio.Semaphore(config.rollout.max_inflight)
        self._log_limit = RateLimitedLog()
        self.sampled_tokens = 0
        """Tokens of the samples that have ended."""

    async def play(self, prompts: Iterable[int]) -> AsyncGenerator[PromptScores]:
        """Yield the scores of each prompt as it finishes. At most ``rollout.max_inflight`` samples run at once.

        Raise ``OtherVersion``, or the error of the engine.
        """
        tasks = [asyncio.ensure_future(self._play(prompt)) for prompt in prompts]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, prompt: int) -> PromptScores:
        row, samples = self._rows[prompt], self._given.samples
        try:
            payload = await (self._complete(prompt, row) if self._environments is None else self._act(prompt, row))
        except (RequestError, EpisodeFailed, ValueError) as error:
            return self._failed(prompt, str(error))
        lengths = payload.sampled_lengths()
        self.sampled_tokens += sum(lengths)
        if self._pinned is None:
            payload.segments[:, 2] = 0  # an engine that has loaded no version of a run writes -1, which stages refuse
        else:
            check_version(payload, self._pinned)
        scored = await self._scorer.score(prompt, row, payload)
        if isinstance(scored, Failed):
            return self._failed(prompt, scored.why)
        return PromptScores(
            prompt=prompt,
            rewards=scored.rewards,
            failed=samples - payload.num_samples,
            truncated=payload.finish.tolist().count(Finish.LENGTH),
            lengths=lengths,
            numbers=scored.numbers,
        )

    async def _complete(self, prompt: int, row: dict[str, Any]) -> GroupPayload:
        """Return completions of the prompt. Raise ``RequestError`` or ``ValueError`` if the model cannot read it."""
        text = prompt_of(row)
        if text is None:
            raise ValueError(f"its prompt is {type(row.get('prompt')).__name__}, not text")
        prompt_ids = self._encode(text)

        async def complete(sample: int) -> Trajectory:
            request = Request(
                id=request_id(), prompt_ids=prompt_ids, sampling=self._sampling, seed=self._seed(prompt, sample)
            )
            async with self._places:
                return await self._engine.generate(request)

        return columns_of(prompt_ids, await asyncio.gather(*map(complete, range(self._given.samples))), None)

    async def _act(self, prompt: int, row: dict[str, Any]) -> GroupPayload:
        """Return the episodes of the prompt that have a result. ``EpisodeFailed`` if none has."""
        assert self._environments is not None
        seeds = [self._seed(prompt, sample) for sample in range(self._given.samples)]
        payload, failures = await self._environments.episodes(row, seeds, self._sampling, self._places)
        for failure in failures:
            self._warn(prompt, failure)
        return payload

    def _seed(self, prompt: int, sample: int) -> int:
        return sample_seed(self._config.seed, self._given.name, prompt, sample)

    def _failed(self, prompt: int, why: str) -> PromptScores:
        self._warn(prompt, why)
        return PromptScores(prompt=prompt, rewards=[], failed=self._given.samples)

    def _warn(self, prompt: int, why: str) -> None:
        if (more := self._log_limit.due()) is not None:
            log.warning("evaluation %s, prompt %d: %s%s", self._given.name, prompt, why, more)
