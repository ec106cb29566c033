# pyright: basic, reportMissingImports=false
"""Advantages: how much better a trajectory was than could be expected of its prompt. One value a trajectory.

``rewards`` [N] float, ``group_ids`` [N] integer -> [N] float32; every token of a trajectory gets the same. A group is
never split over ranks. A group of one, or of equal rewards, has nothing to compare: its advantages are 0.

They are computed in float64, where the sum of equal float32 rewards is exact, and so is their mean: what is rounded in
it would be divided by a deviation of nothing else.
"""

from typing import Protocol

import torch
from torch import Tensor


class Reduction(Protocol):
    """Over the ranks of a trainer, element by element."""

    def sum(self, values: Tensor) -> Tensor: ...

    def max(self, values: Tensor) -> Tensor: ...


def _centred(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reward minus the mean of its group, float64; the group's index, and the sizes of the groups."""
    rewards = rewards.to(torch.float64)
    _, group = torch.unique(group_ids, return_inverse=True)
    zeros = torch.zeros(int(group.max()) + 1 if group.numel() else 0, dtype=rewards.dtype, device=rewards.device)
    count = zeros.index_add(0, group, torch.ones_like(rewards))
    mean = zeros.index_add(0, group, rewards) / count
    return rewards - mean[group], group, count


def grpo(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """Group-normalised, with the group's own mean and sample deviation::

        A_i = (r_i - mean(r_g)) / (std(r_g) + eps)

    Source: Shao et al., DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision; which of the two
    deviations is left open there.
    """
    centred, group, count = _centred(rewards, group_ids)
    squares = torch.zeros_like(count).index_add(0, group, centred**2)
    spread = (squares / (count - 1).clamp(min=1)).sqrt()
    return (centred / (spread[group] + eps)).to(torch.float32)


def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Centred only: dividing by the deviation would favour prompts that are almost always solved, or almost never::

        A_i = r_i - mean(r_g)

    Meant for the constant-length loss (``aggregation.constant``).

    Source: Liu et al., Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2.
    """
    return _centred(rewards, group_ids)[0].to(torch.float32)


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Against the mean of the others in the group, a baseline that does not depend on the trajectory itself::

        A_i = r_i - 1 / (n - 1) * sum_{j != i} r_j = n / (n - 1) * (r_i - mean(r_g))

    Source: Ahmadian et al., Back to Basics (arXiv 2402.14740), section 2.3, RLOO; Kool et al., Buy 4 REINFORCE Samples,
    Get a Baseline for Free! (2019).
    """
    centred, group, count = _centred(rewards, group_ids)
    return (centred * (count / (count - 1).clamp(min=1))[group]).to(torch.float32)


def normalised(advantages: Tensor, mask: Tensor, reduce: Reduction, eps: float = 1e-6) -> Tensor:
    """Whitened over the trained tokens of the whole batch, on all ranks: REINFORCE++ of the per-token returns.

    ``advantages`` [T] (the reward of the token's trajectory, minus what divergence from a reference still costs),
    ``mask`` [T] bool (trained) -> [T] float32; population deviation, a batch of equals gives 0::

        A'_t = (A_t - mean(A)) / (std(A) + eps),  mean and std over the trained tokens of the batch

    Source: Hu et al., REINFORCE++ (arXiv 2501.03262v9), section 3.1, equation 5: one baseline and scale for the batch,
    no group.
    """
    chosen = advantages[mask].to(torch.float64)
    count, total = reduce.sum(torch.stack([torch.ones_like(chosen).sum(), chosen.sum()])).unbind()
    mean = total / count.clamp(min=1)
    squares = reduce.sum(((chosen - mean) ** 2).sum().reshape(1))[0]
    spread = (squares / count.clamp(min=1)).sqrt()
    return ((advantages.to(torch.float64) - mean) / (spread + eps)).to(torch.float32)
