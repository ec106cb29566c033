# pyright: basic, reportMissingImports=false
"""Advantages: how much better a trajectory was than could be expected of its prompt."""

import torch
from torch import Tensor


def grpo(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """Group-normalised advantages, one a trajectory; every token of it gets the same.

    ``rewards`` [N] float, ``group_ids`` [N] integer -> [N] float32, with the group's own mean and sample deviation::

        A_i = (r_i - mean(r_g)) / (std(r_g) + eps)

    A group of one trajectory, or of equal rewards, has nothing to compare: its advantages are 0.

    Source: Shao et al., DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision.
    """
    rewards = rewards.to(torch.float32)
    _, group = torch.unique(group_ids, return_inverse=True)
    zeros = torch.zeros(int(group.max()) + 1 if group.numel() else 0, dtype=rewards.dtype, device=rewards.device)
    count = zeros.index_add(0, group, torch.ones_like(rewards))
    mean = zeros.index_add(0, group, rewards) / count
    centred = rewards - mean[group]
    spread = (zeros.index_add(0, group, centred**2) / (count - 1).clamp(min=1)).sqrt()
    return centred / (spread[group] + eps)
