# pyright: basic, reportMissingImports=false
"""On-policy distillation: a teacher's log-probabilities of the policy's own tokens as an advantage."""

from torch import Tensor


def teacher_advantage(old: Tensor, teacher: Tensor) -> Tensor:
    """Return the negative reverse KL divergence at each token, [T] without gradient::

        A_t = teacher_t - old_t

    Its policy gradient descends KL(policy || teacher) in each context that the policy reached, without regard to later
    tokens (a discount of 0). ``old`` is the trainer's policy at the start of the step and not the engine's: on stale
    tokens, the distance of the *current* policy is the one to reduce, and importance weights correct the sampling.

    Source: Lu et al., On-Policy Distillation (Thinking Machines Lab, 2025); Gu et al., MiniLLM (arXiv 2306.08543),
    section 2.2, the single-step part of its gradient; Agarwal et al., GKD (arXiv 2306.13649).
    """
    return (teacher - old).detach()
