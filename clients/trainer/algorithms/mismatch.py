# pyright: basic, reportMissingImports=false
"""How far the trainer's policy is from the one that wrote the tokens: staleness and numeric differences together.

Each function takes the trained tokens of a whole batch, flat: ``old_logprobs`` and ``behavior_logprobs`` [T].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Logarithms of ratios are cut here, so that one broken token gives a large number and not infinity."""


def _log_ratio(old_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    difference = old_logprobs.detach().to(torch.float64) - behavior_logprobs.detach().to(torch.float64)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def mismatch_kl(old_logprobs: Tensor, behavior_logprobs: Tensor) -> float:
    """KL(engine || trainer) in nats a token, by the k3 estimator; never negative, 0 without tokens::

        r_t = pi_old(x_t) / pi_behaviour(x_t),  x_t ~ pi_behaviour
        KL = mean(r_t - 1 - log r_t)

    Source: Schulman, Approximating KL Divergence (2020), estimator k3.
    """
    log_ratio = _log_ratio(old_logprobs, behavior_logprobs)
    if log_ratio.numel() == 0:
        return 0.0
    return float((log_ratio.exp() - 1.0 - log_ratio).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeights:
    """Of the *untruncated* weights, so that a cap cannot hide what it cuts."""

    mean: float
    max: float
    ess: float
    """Effective sample size as a share of the tokens, in (0, 1]."""
    truncated: float
    """Share of tokens above the cap; 0 without one."""


def importance_weights(old_logprobs: Tensor, behavior_logprobs: Tensor, cap: float) -> ImportanceWeights:
    """Statistics of ``w_t = pi_old(x_t) / pi_behaviour(x_t)``; all weights 1 without tokens::

        ess = (sum w)^2 / (T * sum w^2)

    Source: Kish, Survey Sampling (1965), effective sample size of weighted data.
    """
    weights = _log_ratio(old_logprobs, behavior_logprobs).exp()
    if weights.numel() == 0:
        return ImportanceWeights(mean=1.0, max=1.0, ess=1.0, truncated=0.0)
    ess = weights.sum() ** 2 / (weights.numel() * (weights**2).sum())
    truncated = (weights > cap).to(torch.float64).mean() if cap > 0 else torch.zeros(())
    return ImportanceWeights(
        mean=float(weights.mean()), max=float(weights.max()), ess=float(ess), truncated=float(truncated)
    )
