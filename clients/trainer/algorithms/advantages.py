# pyright: basic, reportMissingImports=false
"""Advantages: how much better a trajectory is than expected for its prompt. One value per trajectory.

``rewards`` [N] float, ``group_ids`` [N] integer -> [N] float32; all tokens of a trajectory share the value. A group is
never split across ranks. A group of one, or of equal rewards, has no comparison, so its advantages are 0.

Advantages are computed in float64, where the sum and the mean of equal float32 rewards are exact. Otherwise a rounding
error of the mean would be divided by a deviation that consists only of that error.
"""

from typing import Protocol

import torch
from torch import Tensor


class Reduction(Protocol):
    """Element-wise reductions over the ranks of a trainer."""

    def sum(self, values: Tensor) -> Tensor: ...

    def max(self, values: Tensor) -> Tensor: ...


def _centred(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return reward minus group mean in float64, the index of each group, and the group sizes."""
    rewards = rewards.to(torch.float64)
    _, group = torch.unique(group_ids, return_inverse=True)
    zeros = torch.zeros(int(group.max()) + 1 if group.numel() else 0, dtype=rewards.dtype, device=rewards.device)
    count = zeros.index_add(0, group, torch.ones_like(rewards))
    mean = zeros.index_add(0, group, rewards) / count
    return rewards - mean[group], group, count


def grpo(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalize by the group's own mean and sample deviation::

        A_i = (r_i - mean(r_g)) / (std(r_g) + eps)

    Source: Shao et al., DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision. The paper does not state
    which of the two deviations it uses.
    """
    centred, group, count = _centred(rewards, group_ids)
    squares = torch.zeros_like(count).index_add(0, group, centred**2)
    spread = (squares / (count - 1).clamp(min=1)).sqrt()
    return (centred / (spread[group] + eps)).to(torch.float32)


def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract the group mean only: dividing by the deviation would favour prompts that are rarely or mostly solved::

        A_i = r_i - mean(r_g)

    Intended for the constant-length loss (``Aggregation.CONSTANT``).

    Source: Liu et al., Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2.
    """
    return _centred(rewards, group_ids)[0].to(torch.float32)


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract the mean of the group's other trajectories, a baseline that is independent of the trajectory itself::

        A_i = r_i - 1 / (n - 1) * sum_{j != i} r_j = n / (n - 1) * (r_i - mean(r_g))

    Source: Ahmadian et al., Back to Basics (arXiv 2402.14740), section 2.3, RLOO; Kool et al., Buy 4 REINFORCE Samples,
    Get a Baseline for Free! (2019).
    """
    centred, group, count = _centred(rewards, group_ids)
    return (centred * (count / (count - 1).clamp(min=1))[group]).to(torch.float32)


def none(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return 0 for every trajectory: rewards do not train, the other terms of the objective do."""
    return torch.zeros(rewards.shape, dtype=torch.float32, device=rewards.device)


def whitened(advantages: Tensor, reduce: Reduction, eps: float = 1e-6) -> Tensor:
    """Whiten over the trained tokens of the whole batch, on all ranks.

    ``advantages`` [T], one for each trained token of the rank -> [T] float32; population deviation, and 0 for a batch
    of equal values::

        A'_t = (A_t - mean(A)) / (std(A) + eps),  mean and std over the trained tokens of the batch

    For ``reinforce_pp``, ``A_t`` is the reward of the token's trajectory minus the remaining cost of divergence from a
    reference; for ``gae``, it is what the critic did not expect.

    Source: Hu et al., REINFORCE++ (arXiv 2501.03262v9), section 3.1, equation 5: one baseline and scale for the batch,
    no group. REINFORCE++-baseline whitens ``dr_grpo``, reward minus group mean, in the same way (there, section 3.2).
    For GAE: ``masked_whiten`` in the PPO of verl (``compute_gae_advantage_return``). It divides by the sample's
    variance plus 1e-8, which differs by a factor of sqrt(1 - 1 / T).
    """
    chosen = advantages.to(torch.float64)
    count, total = reduce.sum(torch.stack([torch.ones_like(chosen).sum(), chosen.sum()])).unbind()
    mean = total / count.clamp(min=1)
    squares = reduce.sum(((chosen - mean) ** 2).sum().reshape(1))[0]
    spread = (squares / count.clamp(min=1)).sqrt()
    return ((chosen - mean) / (spread + eps)).to(torch.float32)
