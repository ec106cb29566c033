"""Composition of steps: the order of a block of prompts that was drawn ahead.

Under a strict trajectory bound a step is as slow as its longest group. A batch of independent draws nearly always
contains a very long group. Sorting the prompts by expected length concentrates the long groups in few steps.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def clustered(lengths: Sequence[float] | NDArray[np.float64], *, longest_first: bool) -> list[int]:
    """Return the positions of a block in order of expected length.

    Prompts without an expected length (0) keep their place, and equal lengths keep their order. Dealing each block
    completely before the next one starves no prompt and prefers no length. Blocks that alternate between longest first
    and shortest first put the long groups of two blocks side by side, so that they wait for each other.
    """
    expected = np.asarray(lengths, dtype=np.float64)
    order = np.arange(len(expected))
    ranked = order[expected > 0]
    order[ranked] = ranked[np.argsort(-expected[ranked] if longest_first else expected[ranked], kind="stable")]
    return order.tolist()
