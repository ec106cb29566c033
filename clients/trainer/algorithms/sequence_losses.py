# pyright: basic, reportMissingImports=false
"""Losses based on a whole trajectory's distance from the engine or the old policy.

``row`` [T] is the trajectory of each token.
"""

import torch
from torch import Tensor

from staleflow.clients.trainer.algorithms.losses import MAX_LOG_RATIO, TokenLoss, plain, ppo_clip


def row_mean(values: Tensor, row: Tensor) -> Tensor:
    """Return the trajectory mean for each token; [T] -> [T], with gradient."""
    _, index, count = torch.unique(row, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add(0, index, values)
    means: Tensor = sums / count.to(values.dtype)
    return means[index]


def gspo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, row: Tensor, *, gspo_low: float, gspo_high: float
) -> TokenLoss:
    """Apply PPO's clip to one length-normalised ratio per trajectory, through which each token has its own gradient::

        s_i    = exp(1 / |y_i| * sum_t (logp_t - old_t))
        s_t    = s_i * exp(logp_t - logp_t), with the second logp_t and s_i constant
        loss_t = -min(s_t * A_t, clip(s_t, 1 - gspo_low, 1 + gspo_high) * A_t)

    Intended for ``Aggregation.SEQUENCE_MEAN``. For equal advantages and weights in a trajectory, value and gradient are
    those of one term per trajectory (GSPO). Where they vary (``gae``, a ``correction``), each token's gradient has its
    own (GSPO-token).

    Source: Zheng et al., GSPO (arXiv 2507.18071v2), section 4.1, equations 5 and 7, and section 4.3 (GSPO-token).
    """
    distance = row_mean((logprobs - old).detach(), row) + (logprobs - logprobs.detach())
    # the distance is already a log-ratio, so the denominator that ppo_clip subtracts is 0
    return ppo_clip(distance, torch.zeros_like(distance), advantages, clip_low=gspo_low, clip_high=gspo_high)


def opsm(
    logprobs: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    row: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    opsm_delta: float,
) -> TokenLoss:
    """PPO's clip of the ratio to the engine, without bad trajectories that became unlikely under the model::

        M_t    = 0 if A_t < 0 and 1 / |y_i| * sum_t (behaviour_t - logp_t) > opsm_delta, else 1
        loss_t = M_t * ppo_clip_t

    Intended for ``Aggregation.SEQUENCE_MEAN``.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1, equations 8 and 9, off-policy sequence masking.
    """
    clipped = ppo_clip(logprobs, behavior, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    distance = row_mean((behavior - logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), row)
    masked = (advantages < 0) & (distance > opsm_delta)
    loss = torch.where(masked, torch.zeros_like(clipped.loss), clipped.loss)
    return plain(loss, low=clipped.low & ~masked, high=clipped.high & ~masked, masked=masked)
