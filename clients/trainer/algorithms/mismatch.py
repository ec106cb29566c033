# pyright: basic, reportMissingImports=false
"""How far the trainer's policy is from the one that wrote the tokens: staleness and numeric differences together.

Each takes trained tokens, flat: ``old_logprobs`` and ``behavior_logprobs`` [T]. Everything is a sum or a maximum over
tokens, so that micro-batches and ranks add up to the batch.
"""

import torch
from torch import Tensor

from staleflow.clients.trainer.algorithms.advantages import Reduction
from staleflow.clients.trainer.algorithms.losses import MAX_LOG_RATIO


def _log_ratio(old_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    difference = old_logprobs.detach().to(torch.float64) - behavior_logprobs.detach().to(torch.float64)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class MismatchSums:
    """What is known of ``w_t = pi_old(x_t) / pi_behaviour(x_t)``, ``x_t ~ pi_behaviour``, micro-batch by micro-batch.

    The weights are the *untruncated* ones, so that a cap cannot hide what it cuts.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._max = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, old_logprobs: Tensor, behavior_logprobs: Tensor, truncated: Tensor) -> None:
        """Count more tokens; ``truncated`` [T] bool: those whose weight the algorithm cut."""
        if old_logprobs.numel() == 0:
            return
        log_ratio = _log_ratio(old_logprobs, behavior_logprobs)
        weights = log_ratio.exp()
        k3 = weights - 1.0 - log_ratio
        parts = (torch.ones_like(weights), weights, weights**2, truncated, k3)
        self._sums += torch.stack([part.sum(dtype=torch.float64) for part in parts])
        self._max = torch.maximum(self._max, weights.max().reshape(1))

    def values(self, reduce: Reduction) -> dict[str, float]:
        """Mean, maximum and effective share of the weights, share cut to a cap, and divergence; 1, 1, 1, 0, 0 of none::

            is_weight/ess = (sum w)^2 / (T * sum w^2)
            mismatch_kl   = mean(w_t - 1 - log w_t)            nats a token, KL(engine || trainer), never negative

        Source: Kish, Survey Sampling (1965), effective sample size of weighted data; Schulman, Approximating KL
        Divergence (2020), estimator k3.
        """
        tokens, weights, squares, cut, k3 = reduce.sum(self._sums).tolist()
        largest = float(reduce.max(self._max)[0])
        if not tokens:
            weights = squares = tokens = largest = 1.0
        return {
            "mismatch_kl": k3 / tokens,
            "is_weight/mean": weights / tokens,
            "is_weight/max": largest,
            "is_weight/ess": weights**2 / (tokens * squares),
            "is_weight/truncated": cut / tokens,
        }
