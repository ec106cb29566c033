# pyright: basic, reportMissingImports=false
"""DPPO: a trust region in the probability of the sampled token instead of its ratio."""

import torch
from torch import Tensor

from staleflow.clients.trainer.algorithms.losses import TokenLoss, plain, ratio_of

_TINY = 1e-8
"""Added to probabilities of the other tokens, which are 0 where the model is certain."""


def dppo(
    logprobs: Tensor, behavior: Tensor, advantages: Tensor, *, divergence: str, dppo_low: float, dppo_high: float
) -> TokenLoss:
    """Surrogate without the tokens that leave the trust region around the engine's policy::

        p = exp(logp_t), q = exp(behaviour_t)
        D_t    = |p - q|                                                  divergence "tv"
        D_t    = q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))        divergence "kl"
        loss_t = -M_t * exp(logp_t - behaviour_t) * A_t
        M_t    = 0 if A_t > 0, p > q and D_t > dppo_high, or if A_t < 0, p < q and D_t > dppo_low, else 1

    D_t is the divergence of the two-valued distributions "this token or another". PPO's ratio bounds rare tokens
    tightly, where a large ratio moves little probability, and frequent ones hardly at all. ``low`` and ``high`` flag
    the tokens that leave the region.

    Source: Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning (arXiv 2602.04879), Binary-TV and
    Binary-KL; thresholds 0.15 (TV) and 0.05 (KL) as in the authors' runs.
    """
    ratio, advantages, behavior = ratio_of(logprobs, behavior), advantages.detach(), behavior.detach()
    current = logprobs.detach()
    p, q = current.exp(), behavior.exp()
    if divergence == "kl":
        others = torch.log(((1.0 - q).clamp(min=0) + _TINY) / ((1.0 - p).clamp(min=0) + _TINY))
        apart = q * (behavior - current) + (1.0 - q) * others
    else:
        apart = (p - q).abs()
    low = (advantages < 0) & (p < q) & (apart > dppo_low)
    high = (advantages > 0) & (p > q) & (apart > dppo_high)
    surrogate = ratio * advantages
    return plain(-torch.where(low | high, torch.zeros_like(surrogate), surrogate), low=low, high=high)
