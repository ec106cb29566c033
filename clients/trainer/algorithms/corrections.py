# pyright: basic, reportMissingImports=false
"""Correction for tokens that the engine generated with other weights: constant weights of the old/behaviour ratio.

Each correction multiplies the PPO loss relative to the trainer's old policy, token by token. ``old``, ``behavior`` [T]
-> ``Correction``, without gradient::

    k_t = pi_old(x_t) / pi_behaviour(x_t)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from staleflow.clients.trainer.algorithms.losses import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Factors of the token losses. All [T]."""

    weight: Tensor
    masked: Tensor
    """Bool: a mask set the weight to 0."""
    truncated: Tensor
    """Bool: the weight was capped."""


def _log_ratio(old: Tensor, behavior: Tensor) -> Tensor:
    return (old - behavior).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _never(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


def uncorrected(old: Tensor, behavior: Tensor) -> Correction:
    """Weight 1: treat the tokens as the old policy's own, regardless of their age."""
    return Correction(weight=torch.ones_like(old), masked=_never(old), truncated=_never(behavior))


def truncated(old: Tensor, behavior: Tensor, *, cap: float | Tensor) -> Correction:
    """TIS: ``min(k_t, cap)``; ``cap``: one for all tokens, or one a token [T].

    Source: Ionides, Truncated Importance Sampling (2008); for engine/trainer pairs: Yao et al., Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training (2025); per token as in IMPALA (arXiv 1802.01561), section 4.1.
    """
    ratio = _log_ratio(old, behavior).exp()
    return Correction(weight=ratio.clamp(max=cap), masked=_never(ratio), truncated=ratio > cap)


def decoupled(old: Tensor, behavior: Tensor) -> Correction:
    """Decoupled PPO: ``k_t`` unchanged; unbiased per token, with unbounded variance.

    Source: Hilton et al., Batch size-invariance for policy optimization (arXiv 2110.00641), the decoupled clipped
    objective, with old as its proximal policy; for language models: AReaL (arXiv 2505.24298), equation 5.
    """
    ratio = _log_ratio(old, behavior).exp()
    return Correction(weight=ratio, masked=_never(ratio), truncated=_never(ratio))


def masked_tokens(old: Tensor, behavior: Tensor, *, low: float, high: float) -> Correction:
    """IcePop, masked importance sampling by token: ``k_t`` if ``low <= k_t <= high``, else 0.

    Source: Ring-1T (arXiv 2510.18855), section 2.3.2, equation 2, IcePop, without its mean over trajectories.
    """
    ratio = _log_ratio(old, behavior).exp()
    out = (ratio < low) | (ratio > high)
    return Correction(weight=torch.where(out, torch.zeros_like(ratio), ratio), masked=out, truncated=_never(ratio))


def masked_sequences(old: Tensor, behavior: Tensor, row: Tensor, *, cap: float) -> Correction:
    """Masked importance sampling by trajectory: apply the ratio of the whole trajectory, or mask all of it::

        k_i = prod_t k_t,   weight = k_i if k_i <= cap, else 0

    Source: Liu et al., When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch
    (2025), masked importance sampling at sequence level.
    """
    _, index = torch.unique(row, return_inverse=True)
    per_token = (old - behavior).detach().to(torch.float64)
    size = int(index.max()) + 1 if index.numel() else 0
    summed = torch.zeros(size, dtype=torch.float64, device=old.device).index_add(0, index, per_token)
    ratio = summed.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[index].to(old.dtype)
    out = ratio > cap
    return Correction(weight=torch.where(out, torch.zeros_like(ratio), ratio), masked=out, truncated=_never(ratio))
