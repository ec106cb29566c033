# pyright: basic, reportMissingImports=false
"""Policy losses over tokens, to be minimised; ``sequence_losses`` has those over whole trajectories.

Three policies are involved. *Behaviour*: the engine, possibly several versions older and with other numerics; its
log-probabilities arrive with the tokens. *Old* (proximal): the trainer's weights at the start of the step. *Current*:
the weights being updated. In a step with a single update, old equals current in value: ``old = logprobs.detach()`` is
exact and saves a forward pass, and a ratio current/old is 1 with a gradient.

The denominator of the ratio:

- ``ppo_clip`` and ``gspo`` with ``ratio_to = "old"``: old. This step cannot change the difference between
  behaviour and old; the ``correction`` accounts for it (decoupled PPO: Hilton et al., arXiv 2110.00641; AReaL, arXiv
  2505.24298; IcePop and TIS likewise). The clip has no effect in a step with a single update.
- ``ppo_clip`` and ``gspo`` with ``ratio_to = "behavior"``, ``cispo``, ``aipo``, ``m2po``, ``opsm``: behaviour. Their
  papers call it old or mu and mean the sampling policy; the ratio is itself the correction, and its bound limits
  staleness. No further correction is applied.

Every tensor is [T]; ``advantages`` and the denominators are constants. ``aggregation`` does the averaging.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios, so that a single corrupt token gives a large number instead of infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Per-token loss and flags for clipped and masked tokens. All [T], the flags bool."""

    loss: Tensor
    low: Tensor
    """The lower bound of a clip removed the gradient."""
    high: Tensor
    """The upper bound of a clip removed the gradient."""
    masked: Tensor
    """The token was excluded."""
    truncated: Tensor
    """The weight was capped; the gradient uses the cap."""


def plain(loss: Tensor, **flags: Tensor) -> TokenLoss:
    """Return a loss in which all tokens count, except for the given flags."""
    never = torch.zeros_like(loss, dtype=torch.bool)
    return TokenLoss(loss=loss, **({"low": never, "high": never, "masked": never, "truncated": never} | flags))


def ratio_of(logprobs: Tensor, denominator: Tensor) -> Tensor:
    """Return ``exp(logprobs - denominator)``, with gradient through ``logprobs``."""
    return torch.exp((logprobs - denominator.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def ppo_clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> TokenLoss:
    """Clipped surrogate; ``dual_clip`` is 0 (off) or a factor above 1::

        r_t    = exp(logp_t - old_t)
        s_t    = min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t)
        loss_t = -s_t                                A_t >= 0
        loss_t = -max(s_t, dual_clip * A_t)          A_t < 0: bounds the push against a token that became likely

    ``low``: A_t < 0 and r_t < 1 - clip_low. ``high``: A_t > 0 and r_t > 1 + clip_high, or cut by the second clip.

    Source: Schulman et al., PPO (arXiv 1707.06347), section 3, equation 7; separate bounds (clip-higher): Yu et al.,
    DAPO (arXiv 2503.14476), section 3.1; second clip: Ye et al., Mastering Complex Control in MOBA Games (arXiv
    1912.09729), equation 5.
    """
    ratio, advantages = ratio_of(logprobs, old), advantages.detach()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    bad = advantages < 0
    low, high = bad & (ratio < 1.0 - clip_low), (advantages > 0) & (ratio > 1.0 + clip_high)
    if dual_clip > 0:
        beyond = bad & (ratio > dual_clip)
        surrogate = torch.where(beyond, dual_clip * advantages, surrogate)
        high = high | beyond
    return plain(-surrogate, low=low, high=high)


def cispo(logprobs: Tensor, behavior: Tensor, advantages: Tensor, *, cispo_low: float, cispo_high: float) -> TokenLoss:
    """REINFORCE with a clipped importance weight, so that every token keeps its gradient::

        w_t    = clip(exp(logp_t - behaviour_t), 1 - cispo_low, 1 + cispo_high), a constant
        loss_t = -w_t * A_t * logp_t

    ``cispo_low`` >= 1 disables the lower bound, as in the paper's runs.

    Source: MiniMax-M1 (arXiv 2506.13585), section 3.1, equations 4 and 5.
    """
    ratio = ratio_of(logprobs, behavior).detach()
    weight = ratio.clamp(1.0 - cispo_low, 1.0 + cispo_high)
    return plain(-weight * advantages.detach() * logprobs, truncated=weight != ratio)


def aipo(logprobs: Tensor, behavior: Tensor, advantages: Tensor, *, aipo_cap: float) -> TokenLoss:
    """REINFORCE with an importance weight that is bounded from above only::

        w_t    = min(exp(logp_t - behaviour_t), aipo_cap), a constant
        loss_t = -w_t * A_t * logp_t

    Source: Wu et al., LlamaRL (arXiv 2505.24034), the update of AIPO, with its constant rho between 2 and 10.
    """
    ratio = ratio_of(logprobs, behavior).detach()
    weight = ratio.clamp(max=aipo_cap)
    return plain(-weight * advantages.detach() * logprobs, truncated=ratio > aipo_cap)


def m2po(logprobs: Tensor, behavior: Tensor, advantages: Tensor, *, limit: float) -> TokenLoss:
    """Unclipped surrogate without the tokens that make the batch's second moment too large::

        loss_t = -M_t * exp(logp_t - behaviour_t) * A_t
        M_t    = 0 if A_t * (logp_t - behaviour_t) > 0 and (logp_t - behaviour_t)^2 > limit, else 1

    The first condition is ``clippable``. ``limit`` is ``second_moment.largest_kept`` of those tokens of the whole
    batch, so that the mean of the kept squares is at most the threshold. Masked tokens remain in the denominator of the
    mean.

    Source: Zheng et al., M2PO (arXiv 2510.01161v2), section 5.2, algorithm 1 and equation 5.
    """
    ratio = ratio_of(logprobs, behavior)
    masked = clippable(logprobs, behavior, advantages) & (squared_log_ratio(logprobs, behavior) > limit)
    loss = -torch.where(masked, torch.zeros_like(ratio), ratio * advantages.detach())
    return plain(loss, masked=masked)


def clippable(logprobs: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    """Return the tokens (bool) that PPO's clip can affect: good tokens that became likelier, bad ones less likely.

    For all others the step moves back towards behaviour and needs no bound: M2PO (arXiv 2510.01161v2), section 5.2.
    """
    return advantages.detach() * (logprobs - behavior).detach() > 0


def squared_log_ratio(logprobs: Tensor, behavior: Tensor) -> Tensor:
    """Return ``(logp_t - behaviour_t)^2`` as a float64 constant."""
    return (logprobs.detach().to(torch.float64) - behavior.detach().to(torch.float64)) ** 2
