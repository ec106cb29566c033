# pyright: basic, reportMissingImports=false
"""M2PO's cutoff: the largest squared log-ratio that a batch may keep, computed with sums over ranks only."""

import torch
from torch import Tensor

from staleflow.clients.trainer.algorithms.advantages import Reduction

_BITS = 63


def largest_kept(squares: Tensor, threshold: float, reduce: Reduction) -> float:
    """Return the largest ``c`` for which the mean of the ``squares <= c`` is at most ``threshold``.

    ``squares`` [T] float64, not negative, are this rank's; the result holds for all ranks together. Tokens leave from
    the largest down, equal ones together, until the rest's second moment is small enough. The mean of the squares up to
    c grows with c, so bisection finds the cutoff. It runs over the bit patterns of a float64, which have the order of
    the numbers: 63 exact sums over the ranks.

    Source: Zheng et al., M2PO (arXiv 2510.01161v2), section 5.2, algorithm 1, where one token leaves at a time.
    """
    low, high = 0, 0x7FEF_FFFF_FFFF_FFFF  # bits of 0.0 and of the largest finite float64
    for _ in range(_BITS):
        if low >= high:
            break
        middle = (low + high + 1) // 2
        kept = squares[squares <= _number(middle)]
        count, total = reduce.sum(torch.stack([torch.ones_like(kept).sum(), kept.sum()])).tolist()
        if total <= threshold * count:
            low = middle
        else:
            high = middle - 1
    return _number(low)


def _number(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int64).view(torch.float64))
