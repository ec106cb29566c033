# pyright: basic, reportMissingImports=false
"""Aggregation of per-token losses: the constant share of each token. The loss is the sum of share * loss.

A share is a weight, which depends on the token's own trajectory, times a scale, which depends on totals of the whole
batch. Passes and ranks therefore add up, and the scale can be applied last, when the batch is complete. ``loss_agg``
selects the aggregation. With ``auto``, the loss function determines it if its paper does (``aggregation_of``),
otherwise the advantage, otherwise the token mean.
"""

from enum import Enum, auto
from typing import Final

import torch
from torch import Tensor


class Aggregation(Enum):
    """Rules that combine token losses into the batch loss."""

    TOKEN_MEAN = auto()
    """``1 / T``: equal weight for every trained token. DAPO (arXiv 2503.14476), section 3.3."""
    SEQUENCE_MEAN = auto()
    """``1 / (N |y_i|)``: equal weight for every trajectory, regardless of length; N counts those with a trained token.
    DeepSeekMath (arXiv 2402.03300), equation 3; GSPO (arXiv 2507.18071), equation 5."""
    CONSTANT = auto()
    """``1 / (N L)``, with L the longest completion allowed: length neither dilutes nor adds weight. N counts all
    trajectories. Dr. GRPO (arXiv 2503.20783), section 3.2: the constant is the generation budget."""


_NAMED: Final = {
    "token_mean": Aggregation.TOKEN_MEAN,
    "sequence_mean": Aggregation.SEQUENCE_MEAN,
    "sequence_sum": Aggregation.CONSTANT,
}
"""Aggregations by their value of ``trainer.algorithm.loss_agg``; ``auto`` is none of them."""


def aggregation_of(advantage: str, loss: str, loss_agg: str = "auto") -> Aggregation:
    """Return the configured aggregation.

    ``auto``: average over trajectories for GSPO, GMPO and OPSM, divide by a constant for Dr. GRPO, else average over
    tokens.
    """
    if loss_agg != "auto":
        return _NAMED[loss_agg]
    if loss in ("gspo", "gmpo", "opsm"):
        return Aggregation.SEQUENCE_MEAN
    return Aggregation.CONSTANT if advantage == "dr_grpo" else Aggregation.TOKEN_MEAN


def weights(how: Aggregation, row: Tensor, longest: int) -> Tensor:
    """Return the weight of each trained token, [T] float32 without gradient; ``row`` [T] is its trajectory.

    The token's share is weight * scale.
    """
    match how:
        case Aggregation.TOKEN_MEAN:
            return torch.ones(row.shape, device=row.device)
        case Aggregation.SEQUENCE_MEAN:
            _, index, count = torch.unique(row, return_inverse=True, return_counts=True)
            lengths: Tensor = count[index].to(torch.float32)
            return lengths.reciprocal()
        case Aggregation.CONSTANT:
            return torch.full(row.shape, 1.0 / longest, device=row.device)


def scale(how: Aggregation, *, tokens: float, sequences: float, trajectories: float) -> float:
    """Return the factor of all weights.

    ``tokens``: trained tokens of the whole batch; ``sequences``: trajectories with a trained token; ``trajectories``:
    all of them.
    """
    match how:
        case Aggregation.TOKEN_MEAN:
            return 1.0 / max(tokens, 1.0)
        case Aggregation.SEQUENCE_MEAN:
            return 1.0 / max(sequences, 1.0)
        case Aggregation.CONSTANT:
            return 1.0 / max(trajectories, 1.0)
