# pyright: basic, reportMissingImports=false
"""From per-token losses to one number: the share of each token, a constant. The loss is the sum of share * loss.

A share is a weight, which depends on the token's own trajectory, times a scale, which depends on totals of the whole
batch: micro-batches and ranks add up, and the scale may come last, when the batch is whole. The loss function decides
where its paper does (``aggregation_of``); else the advantage does; else the token mean.
"""

from enum import Enum, auto

import torch
from torch import Tensor


class Aggregation(Enum):
    """How token losses become the batch's."""

    TOKEN_MEAN = auto()
    """``1 / T``: every trained token alike. DAPO (arXiv 2503.14476), section 3.3."""
    SEQUENCE_MEAN = auto()
    """``1 / (N |y_i|)``: every trajectory alike, whatever its length; N counts those with a trained token. DeepSeekMath
    (arXiv 2402.03300), equation 3; GSPO (arXiv 2507.18071), equation 5."""
    CONSTANT = auto()
    """``1 / (N L)``, L the longest completion allowed: length neither dilutes nor adds weight. N counts every
    trajectory. Dr. GRPO (arXiv 2503.20783), section 3.2: the constant is the generation budget."""


def aggregation_of(advantage: str, loss: str) -> Aggregation:
    """GSPO and OPSM average over trajectories; Dr. GRPO divides by a constant; all others over tokens."""
    if loss in ("gspo", "opsm"):
        return Aggregation.SEQUENCE_MEAN
    return Aggregation.CONSTANT if advantage == "dr_grpo" else Aggregation.TOKEN_MEAN


def weights(how: Aggregation, row: Tensor, longest: int) -> Tensor:
    """Weight of each trained token, [T] float32, no gradient; ``row`` [T] says whose it is. Share = weight * scale."""
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
    """What every weight is multiplied by: ``tokens`` trained, ``sequences`` with any, ``trajectories`` at all, of the
    whole batch."""
    match how:
        case Aggregation.TOKEN_MEAN:
            return 1.0 / max(tokens, 1.0)
        case Aggregation.SEQUENCE_MEAN:
            return 1.0 / max(sequences, 1.0)
        case Aggregation.CONSTANT:
            return 1.0 / max(trajectories, 1.0)
