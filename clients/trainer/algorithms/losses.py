# pyright: basic, reportMissingImports=false
"""Policy losses over tokens.

Three policies meet here. *Behaviour*: the engine, possibly several versions and another numeric path ago; its own
log-probabilities came with the tokens. *Old* (proximal): the trainer's weights when the step begins, the centre of the
trust region. *Current*: the weights being moved. The ratio that PPO clips is current/old; the distance from behaviour
to old is a given, not something this step can change, and is corrected by a detached weight (``tis_weights``). That
split is decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298). With one optimiser step a batch,
old equals current in value, so ``old = logprobs.detach()`` is exact and saves a forward pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """Per-token loss, and which tokens have their gradient cut by the clip. All [N, L]."""

    loss: Tensor
    low: Tensor
    """Bool: negative advantage and ratio below 1 - ``clip_low``."""
    high: Tensor
    """Bool: positive advantage and ratio above 1 + ``clip_high``."""


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Clipped:
    """The clipped surrogate, one value a token, to be minimised; masking and averaging are the caller's.

    ``logprobs``, ``old_logprobs`` [N, L] (old is taken as a constant), ``advantages`` [N]::

        r_t = exp(logp_t - old_t)
        loss_t = -min(r_t * A, clip(r_t, 1 - clip_low, 1 + clip_high) * A)

    Source: Schulman et al., PPO (arXiv 1707.06347), equation 7; apart clip bounds: Yu et al., DAPO (arXiv 2503.14476),
    section 3.1.
    """
    ratio = torch.exp(logprobs - old_logprobs.detach())
    advantage = advantages.detach().unsqueeze(-1)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    with torch.no_grad():
        low = (advantage < 0) & (ratio < 1.0 - clip_low)
        high = (advantage > 0) & (ratio > 1.0 + clip_high)
    return Clipped(loss=loss, low=low, high=high)


def tis_weights(old_logprobs: Tensor, behavior_logprobs: Tensor, cap: float) -> Tensor:
    """Truncated importance weights of the engine's tokens, a constant to multiply each token's loss with.

    ``old_logprobs``, ``behavior_logprobs`` [N, L] -> [N, L], no gradient; ``cap`` 0 gives ones::

        w_t = min(pi_old(x_t) / pi_behaviour(x_t), cap)

    Source: Ionides, Truncated Importance Sampling (2008); for engine/trainer pairs: Yao et al., Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training (2025); per token as in IMPALA (arXiv 1802.01561).
    """
    if cap == 0:
        return torch.ones_like(old_logprobs)
    difference = (old_logprobs - behavior_logprobs).detach()
    return torch.exp(difference.clamp(max=float(torch.tensor(cap, dtype=torch.float64).log()))).clamp(max=cap)


def token_mean(values: Tensor, mask: Tensor, tokens: int) -> Tensor:
    """Sum of ``values`` [N, L] where ``mask`` [N, L], divided by the trained ``tokens`` of the *whole* batch.

    The sum of this over micro-batches is the batch's token mean however the batch was cut. Masked positions may hold
    anything, NaN included: they neither count nor carry gradient.

    Source: token-level loss of DAPO (arXiv 2503.14476), section 3.3.
    """
    return torch.where(mask, values, torch.zeros_like(values)).sum() / max(tokens, 1)
