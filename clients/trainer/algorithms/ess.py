# pyright: basic, reportMissingImports=false
"""The effective sample size of a batch's trajectories, and the learning rate that it justifies."""

import math

import torch
from torch import Tensor

from staleflow.clients.trainer.algorithms.advantages import Reduction
from staleflow.clients.trainer.algorithms.losses import MAX_LOG_RATIO


class TrajectoryWeights:
    """Sums of ``w_i = prod_t pi_old(x_t) / pi_behaviour(x_t)``, accumulated over forward passes."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, old: Tensor, behavior: Tensor, row: Tensor) -> None:
        """Add the trained tokens [T] of some whole trajectories; ``row`` [T] is the trajectory of each."""
        _, index = torch.unique(row, return_inverse=True)
        size = int(index.max()) + 1 if index.numel() else 0
        distance = (old - behavior).detach().to(torch.float64)
        summed = torch.zeros(size, dtype=torch.float64, device=row.device).index_add(0, index, distance)
        weight = summed.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        self._sums += torch.stack([torch.ones_like(weight).sum(), weight.sum(), (weight**2).sum()])

    def ess(self, reduce: Reduction) -> float:
        """Return the normalised effective sample size over all ranks, from 1 / N to 1; 1 without a trajectory::

            rho = (sum_i w_i)^2 / (N * sum_i w_i^2)

        Source: Kish, Survey Sampling (1965), effective sample size of weighted data.
        """
        count, total, squares = reduce.sum(self._sums).tolist()
        return float(total**2 / (count * squares)) if count else 1.0


def lr_factor(ess: float) -> float:
    """Return the factor of the learning rate: ``sqrt(rho)``.

    The variance of the gradient is that of a batch of rho * N trajectories, and Adam's learning rate scales with the
    square root of the batch size.

    Source: Huang et al., Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs (VCPO, arXiv 2602.17616), with
    its reference rho of 1: trajectory weights, not truncated.
    """
    return math.sqrt(min(1.0, ess))
