# pyright: basic, reportMissingImports=false
"""Divergence from a reference model as a per-token loss. Pure functions of [T] log-probabilities.

With ``d_t = logp_t - ref_t`` and tokens of the current policy, all three estimate KL(current || reference) in nats a
token. An estimator's value and its gradient are two things: what descends KL is ``E[d_t * grad logp_t]`` (Tang and
Munos, On a few pitfalls in KL divergence gradient estimation for RL, arXiv 2506.09477).
"""

import math
from typing import Final

import torch
from torch import Tensor

KL_NAMES: Final = ("k1", "k2", "k3")
_FAR = 10.0
"""Nats below the reference from which k3 is a straight line."""


def kl_loss(kind: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token divergence loss [T] of estimator ``kind``::

        k1    d_t                           value without bias, may be negative
        k2    d_t^2 / 2                     small bias, never negative
        k3    exp(-d_t) - 1 + d_t           without bias, never negative

    Gradient. k2: ``d_t * grad logp_t``, that of KL. k3: ``(1 - exp(-d_t)) * grad logp_t``, the same to first order in
    d_t: at most 1 where the model has grown too sure, and up to e^10 - 1 the other way: below d_t = -10 k3 goes on as
    its tangent, so that a token farther away is pulled back no harder than one there, and not let go of either. k1:
    differentiating ``d_t`` would give ``grad logp_t``, 0 on average, a loss that holds nothing back; so k1 here has the
    value ``d_t`` and, by a detached factor, the gradient ``d_t * grad logp_t``.

    The reference is a constant. Old tokens are not weighted: off-policy it is the divergence where the engine went
    (DeepSeek-V3.2, arXiv 2512.02556, equation 7, has the weight).

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
            near = distance.clamp(min=-_FAR)
            return torch.exp(-near) - 1.0 + near + (distance - near) * (1.0 - math.exp(_FAR))
        case _:
            raise ValueError(f"{kind} is no estimator: one of {', '.join(KL_NAMES)}")
