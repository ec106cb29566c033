"""The reward stage: rewards that the environment returned, else the user's function on every completion."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.stage.worker import Failed, StageGroup, StageOutcome
from staleflow.clients.texts import Decode
from staleflow.clients.user_code.rewards import RewardFailed, RewardRunner, Sample
from staleflow.configs.rewards import FACTS, FINISH_REASONS, components
from staleflow.configs.schema import Reward
from staleflow.protocols.wire.stages import ENVIRONMENT_REWARD, short_name
from staleflow.protocols.wire.trajectory import GroupPayload

COLUMN = "reward"


class RewardStage:
    """Compute ``reward``, float32 [n]. Groups are scored concurrently; one sample without a reward fails its group.

    ``runner`` is None without ``reward.run``: every group must come with its environment's reward then.
    """

    together: ClassVar[bool] = False

    def __init__(self, runner: RewardRunner | None, decode: Decode) -> None:
        self._runner = runner
        self._decode = decode

    @property
    def calls(self) -> int:
        """Maximum number of concurrent calls of the function; 0: there is no function."""
        return 0 if self._runner is None else self._runner.calls

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        async with asyncio.TaskGroup() as tasks:
            scoring = [tasks.create_task(self._score(group)) for group in groups]
        return [task.result() for task in scoring]

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        """Do nothing: rewards need no learning."""

    async def _score(self, group: StageGroup) -> StageOutcome:
        if (returned := group.payload.stages.get(ENVIRONMENT_REWARD)) is not None:
            nothing = np.zeros(group.payload.num_samples, np.float32)
            return {COLUMN: returned, **dict.fromkeys(self._runner.names if self._runner else (), nothing)}
        if self._runner is None:
            return Failed("its environment returned no reward, and reward.run is not set")
        if conflict := name_conflict(group.row, group.payload):
            return Failed(conflict)
        try:
            texts = self._decode(completions(group.payload))
            arguments = samples(group.row, texts, numbers_of(group.payload), facts_of(group.payload))
            scores = await self._runner.scores(arguments)
        except RewardFailed as failed:
            return Failed(str(failed))
        return {name: np.asarray(values, np.float32) for name, values in scores.items()}


@asynccontextmanager
async def reward_stage(settings: Reward, decode: Decode) -> AsyncGenerator[RewardStage]:
    """Open the stage and its process. Raise ``ConfigError`` if ``reward.run`` cannot be loaded."""
    if not components(settings):
        yield RewardStage(None, decode)
        return
    runner = RewardRunner.of(settings)
    try:
        await runner.start()
        yield RewardStage(runner, decode)
    finally:
        await runner.close()


def completions(payload: GroupPayload) -> list[NDArray[np.int32]]:
    """Return the completion tokens of each sample (views)."""
    return np.split(payload.token_ids, np.cumsum(payload.lengths)[:-1])


def numbers_of(payload: GroupPayload) -> list[dict[str, float]]:
    """Return for each sample, by name: the numbers that its environment returned and the columns of
    ``reward.needs``."""
    named = {short_name(name).partition("/")[2]: column for name, column in payload.stages.items()}
    return [{name: float(column[sample]) for name, column in named.items()} for sample in range(payload.num_samples)]


def facts_of(payload: GroupPayload) -> list[dict[str, Any]]:
    """Return for each sample the values of ``FACTS``."""
    return [facts(ids, finish) for ids, finish in zip(completions(payload), payload.finish.tolist(), strict=True)]


def facts(token_ids: NDArray[np.int32], finish: int) -> dict[str, Any]:
    """Return the values of ``FACTS`` for a completion that ended with the ``Finish`` of this number."""
    return dict(zip(FACTS, (token_ids.tolist(), len(token_ids), FINISH_REASONS[finish]), strict=True))


def name_conflict(row: dict[str, Any], payload: GroupPayload) -> str:
    """Return why the numbers of a group cannot be arguments of the reward; "" if they can."""
    sources = {**dict.fromkeys(("prompt", "completion"), "the sample"), **dict.fromkeys(row, "the prompt's row")}
    for name in payload.stages:
        stage, _, argument = short_name(name).partition("/")
        if argument in sources:
            return f'"{argument}" comes from {sources[argument]} and from {stage}; the reward takes one value per name'
        sources[argument] = stage
    return ""


def samples(
    row: dict[str, Any],
    texts: Sequence[str],
    numbers: Sequence[dict[str, float]] | None = None,
    known: Sequence[dict[str, Any]] | None = None,
) -> list[Sample]:
    """Build the arguments of the reward: the row's prompt, one completion, the row's other columns, its ``numbers``,
    and ``known``, its ``facts``."""
    columns = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
    prompt = row.get("prompt", "")
    prompt = prompt if isinstance(prompt, str) else str(prompt)
    own = [dict[str, float]()] * len(texts) if numbers is None else numbers
    known = [dict[str, Any]()] * len(texts) if known is None else known
    return [
        Sample(prompt=prompt, completion=text, columns=columns | its, messages=row.get("messages"), facts=more)
        for text, its, more in zip(texts, own, known, strict=True)
    ]
