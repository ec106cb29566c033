"""Which groups are worth training on, judged by the columns of the first stage: later stages cost a model's time."""

from collections.abc import Callable, Mapping
from typing import Final

from staleflow.configs.rules.algorithm import FilterName
from staleflow.protocols.wire.stages import REWARD_COLUMN
from staleflow.protocols.wire.tensors import Array

Filter = Callable[[Mapping[str, Array]], bool]
"""Columns of the reward stage by full name -> True to keep the group."""


def none(columns: Mapping[str, Array]) -> bool:
    """Keeps everything."""
    return True


def zero_spread(columns: Mapping[str, Array]) -> bool:
    """Keeps groups whose samples differ in reward: against the group equal rewards give no advantage, and so nothing to
    learn. Against a batch or a critic they do."""
    rewards: list[float] = columns[REWARD_COLUMN].tolist()
    return max(rewards) > min(rewards)


FILTERS: Final[dict[FilterName, Filter]] = {"none": none, "zero_spread": zero_spread}
