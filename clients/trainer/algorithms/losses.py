# pyright: basic, reportMissingImports=false
"""Policy losses over tokens, to be minimised; ``sequence_losses`` has those that look at whole trajectories.

Three policies meet here. *Behaviour*: the engine, possibly several versions and another numeric path ago; its own
log-probabilities came with the tokens. *Old* (proximal): the trainer's weights when the step begins. *Current*: the
weights being moved. There is one optimiser step a batch, so old equals current in value, always:
``old = logprobs.detach()`` is exact and saves a forward pass, and a ratio current/old is 1 with a gradient.

Which policy stands below the fraction:

- ``ppo_clip`` with ``ratio_to = "old"``: old. What lies between behaviour and old is a given that this step cannot
  change; it is the ``correction``'s (decoupled PPO: Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298; IcePop
  and TIS likewise). The clip is idle as long as a batch is one step.
- ``ppo_clip`` with ``ratio_to = "behavior"``, ``gspo``, ``cispo``, ``aipo``, ``m2po``, ``opsm``: behaviour. Their
  papers call it old or mu and mean the policy that sampled; the ratio is itself the correction, and its bound acts on
  staleness. No further correction is applied.

Every tensor is [T]; ``advantages`` and everything of the denominator are constants. Averaging is ``aggregation``'s.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Logarithms of ratios are cut here, so that one broken token gives a large number and not infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Per-token loss and what happened to whom. All [T], the flags bool."""

    loss: Tensor
    low: Tensor
    """Gradient cut by the lower bound of a clip."""
    high: Tensor
    """Gradient cut by the upper bound of a clip."""
    masked: Tensor
    """Taken out altogether."""
    truncated: Tensor
    """Weight cut to its cap; the gradient goes on with the cap."""


def plain(loss: Tensor, **flags: Tensor) -> TokenLoss:
    """A loss whose tokens all count, but for the flags given."""
    never = torch.zeros_like(loss, dtype=torch.bool)
    return TokenLoss(loss=loss, **({"low": never, "high": never, "masked": never, "truncated": never} | flags))


def ratio_of(logprobs: Tensor, denominator: Tensor) -> Tensor:
    """``exp(logprobs - denominator)``, with gradient of ``logprobs``."""
    return torch.exp((logprobs - denominator.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def ppo_clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> TokenLoss:
    """The clipped surrogate; ``dual_clip`` 0 is off, else a factor above 1::

        r_t    = exp(logp_t - old_t)
        s_t    = min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t)
        loss_t = -s_t                                A_t >= 0
        loss_t = -max(s_t, dual_clip * A_t)          A_t < 0: a token grown very likely pushes no harder than that

    ``low``: A_t < 0 and r_t < 1 - clip_low. ``high``: A_t > 0 and r_t > 1 + clip_high, or cut by the second clip.

    Source: Schulman et al., PPO (arXiv 1707.06347), section 3, equation 7; apart bounds (clip-higher): Yu et al., DAPO
    (arXiv 2503.14476), section 3.1; second clip: Ye et al., Mastering Complex Control in MOBA Games (arXiv 1912.09729),
    equation 5.
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
    """REINFORCE with a clipped importance weight: no token ever loses its gradient::

        w_t    = clip(exp(logp_t - behaviour_t), 1 - cispo_low, 1 + cispo_high), a constant
        loss_t = -w_t * A_t * logp_t

    ``cispo_low`` >= 1 is no lower bound, as in the paper's runs.

    Source: MiniMax-M1 (arXiv 2506.13585), section 3.1, equations 4 and 5.
    """
    ratio = ratio_of(logprobs, behavior).detach()
    weight = ratio.clamp(1.0 - cispo_low, 1.0 + cispo_high)
    return plain(-weight * advantages.detach() * logprobs, truncated=weight != ratio)


def aipo(logprobs: Tensor, behavior: Tensor, advantages: Tensor, *, aipo_cap: float) -> TokenLoss:
    """REINFORCE with an importance weight that is cut from above only::

        w_t    = min(exp(logp_t - behaviour_t), aipo_cap), a constant
        loss_t = -w_t * A_t * logp_t

    Source: Wu et al., LlamaRL (arXiv 2505.24034), the update of AIPO, with its constant rho between 2 and 10.
    """
    ratio = ratio_of(logprobs, behavior).detach()
    weight = ratio.clamp(max=aipo_cap)
    return plain(-weight * advantages.detach() * logprobs, truncated=ratio > aipo_cap)


def m2po(logprobs: Tensor, behavior: Tensor, advantages: Tensor, *, limit: float) -> TokenLoss:
    """The unclipped surrogate without the tokens that make the batch's second moment too large::

        loss_t = -M_t * exp(logp_t - behaviour_t) * A_t
        M_t    = 0 if A_t * (logp_t - behaviour_t) > 0 and (logp_t - behaviour_t)^2 > limit, else 1

    The first condition is ``clippable``. ``limit`` is ``second_moment.largest_kept`` of those tokens of the whole
    batch, so that the mean of the squares that they keep is at most the threshold. Masked tokens stay in the
    denominator of the mean.

    Source: Zheng et al., M2PO (arXiv 2510.01161v2), section 5.2, algorithm 1 and equation 5.
    """
    ratio = ratio_of(logprobs, behavior)
    masked = clippable(logprobs, behavior, advantages) & (squared_log_ratio(logprobs, behavior) > limit)
    loss = -torch.where(masked, torch.zeros_like(ratio), ratio * advantages.detach())
    return plain(loss, masked=masked)


def clippable(logprobs: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    """Bool: what PPO's clip can act on, good tokens that have grown likelier and bad ones less likely.

    Elsewhere the step goes back towards behaviour, which nothing has to bound: M2PO (arXiv 2510.01161v2), section 5.2.
    """
    return advantages.detach() * (logprobs - behavior).detach() > 0


def squared_log_ratio(logprobs: Tensor, behavior: Tensor) -> Tensor:
    """``(logp_t - behaviour_t)^2``, float64, a constant."""
    return (logprobs.detach().to(torch.float64) - behavior.detach().to(torch.float64)) ** 2
