"""Which groups are worth training on, once every stage is done."""

from collections.abc import Callable, Mapping
from typing import Final

from staleflow.protocols.wire.tensors import Array
from staleflow.protocols.wire.trajectory import STAGE

REWARD: Final = f"{STAGE}reward/reward"
"""The column that every group has after the reward stage."""

Filter = Callable[[Mapping[str, Array]], bool]
"""Stage columns by full name -> True to keep the group."""


def none(columns: Mapping[str, Array]) -> bool:
    """Keeps everything."""
    return True


def zero_spread(columns: Mapping[str, Array]) -> bool:
    """Keeps groups whose samples differ in reward: equal rewards give no advantage, and so nothing to learn."""
    rewards = columns[REWARD]
    return bool(rewards.max() > rewards.min())


FILTERS: Final[dict[str, Filter]] = {"none": none, "zero_spread": zero_spread}
