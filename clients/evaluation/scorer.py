"""Score samples of an evaluation with the reward of the run and the stages that it needs.

Functions run in child processes, as in stage workers. Each stage gets the columns that it would get there.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.stage.reward import reward_stage
from staleflow.clients.stage.user_stage import user_stage
from staleflow.clients.stage.worker import Failed, Stage, StageGroup
from staleflow.clients.texts import Decode
from staleflow.clients.trainer.data.column_means import metric_name
from staleflow.configs.schema import Config
from staleflow.configs.stages import Node, before_reward
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.stages import (
    REWARD,
    REWARD_COLUMN,
    full_name,
    is_per_token,
    short_name,
)
from staleflow.protocols.wire.trajectory import GroupPayload


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Numbers of each sample of a group."""

    rewards: list[float]
    numbers: dict[str, list[float]]
    """Under their metric names: ``reward/NAME``, ``environment/NAME``, ``stage/STAGE/COLUMN``."""


class Scorer:
    """The stages up to the reward, in topological order."""

    def __init__(self, stages: Sequence[tuple[Node, Stage]]) -> None:
        self._stages = stages

    async def score(self, prompt: int, row: dict[str, Any], payload: GroupPayload) -> Scored | Failed:
        """Score a group. ``payload`` has the columns of its environment."""
        columns = dict(payload.stages)
        for node, stage in self._stages:
            needed = payload.stages | {name: columns[name] for name in node.needs}
            group = StageGroup(group=GroupId(prompt), row=row, payload=replace(payload, stages=needed))
            (outcome,) = await stage.make([group])
            if isinstance(outcome, Failed):
                return Failed(f"stage {node.name}: {outcome.why}")
            of_reward = node.name == REWARD  # its columns have short names, those of other stages their full ones
            columns |= {full_name(REWARD, name) if of_reward else name: made for name, made in outcome.items()}
        rewards = columns.pop(REWARD_COLUMN)
        return Scored(
            rewards.tolist(),
            {metric_name(short_name(name)): _by_sample(name, columns[name], payload.lengths) for name in columns},
        )


@asynccontextmanager
async def open_scorer(config: Config, decode: Decode) -> AsyncGenerator[Scorer]:
    """Start the processes of the reward and of its stages. ``ConfigError`` if a function cannot be loaded."""
    settings = {given.name: given for given in config.stage}
    async with AsyncExitStack() as stack:
        stages: list[tuple[Node, Stage]] = []
        for node in before_reward(config):
            if node.name == REWARD:
                stages.append((node, await stack.enter_async_context(reward_stage(config.reward, decode))))
            else:
                stage = await stack.enter_async_context(user_stage(settings[node.name], node, decode))
                stages.append((node, stage))
        yield Scorer(stages)


def _by_sample(name: str, column: NDArray[np.float32], lengths: NDArray[np.int32]) -> list[float]:
    """Return one number for each sample; of a column for each token, the mean over its completion."""
    if not is_per_token(name):
        return [float(value) for value in column]
    parts = np.split(column, np.cumsum(lengths)[:-1])
    return [float(part.mean(dtype=np.float64)) if part.size else 0.0 for part in parts]
