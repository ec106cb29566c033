# pyright: basic, reportMissingImports=false
"""Divergence from a reference model as a per-token loss. Pure functions of [T] log-probabilities.

With ``d_t = logp_t - ref_t`` and tokens of the current policy, all three estimate KL(current || reference) in nats per
token. An estimator's value and its gradient must be distinguished: ``E[d_t * grad logp_t]`` descends KL (Tang and
Munos, On a few pitfalls in KL divergence gradient estimation for RL, arXiv 2506.09477).
"""

import math
from typing import Final

import torch
from torch import Tensor

KL_NAMES: Final = ("k1", "k2", "k3")
_LINEAR_BELOW = 10.0
"""Distance in nats below the reference from which k3 continues linearly."""


def kl_loss(kind: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the per-token divergence loss [T] of estimator ``kind``::

        k1    d_t                           value without bias, may be negative
        k2    d_t^2 / 2                     small bias, never negative
        k3    exp(-d_t) - 1 + d_t           without bias, never negative

    Gradient. k2: ``d_t * grad logp_t``, the gradient of KL. k3: ``(1 - exp(-d_t)) * grad logp_t``, equal to first order
    in d_t. Its factor is at most 1 where the model became too certain, and up to e^10 - 1 in the other direction: below
    d_t = -10, k3 continues as its tangent, so that more distant tokens are pulled back equally hard but still are. Its
    pull grows exponentially before that, so the default is k2 (docs/decisions/0037).

    Differentiating ``d_t`` would give ``grad logp_t``, which is 0 on average and restrains nothing. Therefore k1 has
    the value ``d_t`` and, through a detached factor, the gradient ``d_t * grad logp_t``.

    The reference is a constant. Old tokens are not reweighted: off-policy, this is the divergence at the tokens that
    the engine chose (DeepSeek-V3.2, arXiv 2512.02556, equation 7, adds the weight).

    Source: Schulman, Approximating KL Divergence (2020); k3 in the loss: DeepSeekMath (arXiv 2402.03300), equation 4.
    """
    distance = logprobs - reference.detach()
    match kind:
        case "k1":
            here = distance.detach()
            return here + here * (logprobs - logprobs.detach())
        case "k2":
            return distance**2 / 2
        case "k3":
            near = distance.clamp(min=-_LINEAR_BELOW)
            return torch.exp(-near) - 1.0 + near + (distance - near) * (1.0 - math.exp(_LINEAR_BELOW))
        case _:
            raise ValueError(f"unknown estimator: {kind}; allowed: {', '.join(KL_NAMES)}")
