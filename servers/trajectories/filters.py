"""Filters of groups by their rewards.

A filter reads only the columns of the reward stage: later stages cost a model's time, which filtered groups save.
"""

from collections.abc import Callable, Mapping
from typing import Final

from staleflow.configs.rules.algorithm import FilterName
from staleflow.protocols.wire.stages import REWARD_COLUMN
from staleflow.protocols.wire.tensors import Array

Filter = Callable[[Mapping[str, Array]], bool]
"""Function from the columns of the reward stage, by full name, to True if the group is kept."""


def none(columns: Mapping[str, Array]) -> bool:
    """Keep every group."""
    return True


def zero_spread(columns: Mapping[str, Array]) -> bool:
    """Keep groups whose samples differ in reward.

    Relative to their own group, equal rewards have zero advantage and teach nothing. Relative to a batch or a critic
    they do.
    """
    rewards: list[float] = columns[REWARD_COLUMN].tolist()
    return max(rewards) > min(rewards)


FILTERS: Final[dict[FilterName, Filter]] = {"none": none, "zero_spread": zero_spread}
