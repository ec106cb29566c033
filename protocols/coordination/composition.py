"""Which prompts share a step: the order of a block of prompts that was drawn ahead.

Under a strict trajectory bound a step is as slow as its longest group. A batch of independent draws nearly always holds
a very long one; prompts in order of expected length let the long ones meet in few steps.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def clustered(lengths: Sequence[float] | NDArray[np.float64], *, longest_first: bool) -> list[int]:
    """Positions of a block in order of expected length; those without one (0) keep their place, equal ones their order.

    Whoever deals a whole block before the next one starves nobody and prefers no length. Blocks that alternate between
    longest first and shortest first put the long groups of two blocks side by side, where they wait for each other.
    """
    given = np.asarray(lengths, dtype=np.float64)
    order = np.arange(len(given))
    known = order[given > 0]
    order[known] = known[np.argsort(-given[known] if longest_first else given[known], kind="stable")]
    return order.tolist()
