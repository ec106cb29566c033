# pyright: basic, reportMissingImports=false
"""Veto against bad trajectories with a token that the trainer's model would almost never produce."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from staleflow.clients.trainer.algorithms.losses import TokenLoss
from staleflow.clients.trainer.algorithms.sequence_losses import row_mean


def vetoed(
    result: TokenLoss, old: Tensor, behavior: Tensor, advantages: Tensor, row: Tensor, below: float
) -> TokenLoss:
    """Mask trajectories of negative advantage that contain a token with a ratio trainer/engine under ``below``::

        M_i    = 0 if A_i < 0 and min_t exp(old_t - behaviour_t) < below, else 1
        loss_t = M_i * loss_t

    A_i is the mean of the trajectory's advantages. Such a token is a mismatch of the two computations or long outdated.
    Its ratio is near 0, but pushing the rest of the trajectory down moves probability to unknown places. A trajectory
    of positive advantage is kept, since its update is bounded by what it makes likelier.

    Source: the token veto of verl's rollout correction (Liu et al., When Speed Kills Stability, 2025; threshold 1e-4),
    here limited to negative advantages as in off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, equation 9).
    """
    rare = (old - behavior).detach() < math.log(below)
    masked = (row_mean(rare.to(torch.float32), row) > 0) & (row_mean(advantages.detach(), row) < 0)
    return replace(
        result,
        loss=torch.where(masked, torch.zeros_like(result.loss), result.loss),
        low=result.low & ~masked,
        high=result.high & ~masked,
        masked=result.masked | masked,
        truncated=result.truncated & ~masked,
    )
