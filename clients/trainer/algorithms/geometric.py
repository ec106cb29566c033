# pyright: basic, reportMissingImports=false
"""Geometric means of a trajectory's token ratios: the GMPO loss, and a mask of trajectories far from the engine.

The geometric mean of the ratios, ``exp`` of the mean log-ratio, does not grow with length as their product does, and a
single outlier moves it little.
"""

import torch
from torch import Tensor

from staleflow.clients.trainer.algorithms.corrections import Correction
from staleflow.clients.trainer.algorithms.losses import MAX_LOG_RATIO, TokenLoss, plain
from staleflow.clients.trainer.algorithms.sequence_losses import row_mean


def gmpo(
    logprobs: Tensor, behavior: Tensor, advantages: Tensor, row: Tensor, *, gmpo_low: float, gmpo_high: float
) -> TokenLoss:
    """GMPO: clip each token's log-ratio, then take the geometric mean; every token carries the trajectory's loss::

        d_t    = logp_t - behaviour_t
        c_t    = min(d_t, gmpo_high)    A_i >= 0
        c_t    = max(d_t, -gmpo_low)    A_i < 0
        loss_i = -exp(1 / |y_i| * sum_t c_t) * A_i

    A_i is the mean of the trajectory's advantages. Intended for ``Aggregation.SEQUENCE_MEAN``, which turns the equal
    tokens into one term per trajectory. A clipped token has no gradient, but the other tokens keep theirs.

    Source: Zhao et al., Geometric-Mean Policy Optimization (arXiv 2507.20673), section 3, whose bounds are e^-0.4 and
    e^0.4.
    """
    distance = (logprobs - behavior.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    mean = row_mean(advantages.detach(), row)
    bounded = torch.where(mean < 0, distance.clamp(min=-gmpo_low), distance.clamp(max=gmpo_high))
    ratio = torch.exp(row_mean(bounded, row))
    low, high = (mean < 0) & (distance < -gmpo_low), (mean > 0) & (distance > gmpo_high)
    return plain(-ratio * mean, low=low, high=high)


def masked_geometric(old: Tensor, behavior: Tensor, row: Tensor, *, low: float, high: float, cap: float) -> Correction:
    """Mask trajectories by the geometric mean of their ratios, and truncate the token weights of the others::

        g_i    = exp(1 / |y_i| * sum_t log k_t)
        weight = min(k_t, cap) if low <= g_i <= high, else 0

    Source: Liu et al., When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch
    (2025), part 3, geometric rejection; combined with TIS by token as in verl's rollout correction.
    """
    log_ratio = (old - behavior).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, geometric = log_ratio.exp(), row_mean(log_ratio, row).exp()
    out = (geometric < low) | (geometric > high)
    weight = torch.where(out, torch.zeros_like(ratio), ratio.clamp(max=cap))
    return Correction(weight=weight, masked=out, truncated=(ratio > cap) & ~out)
