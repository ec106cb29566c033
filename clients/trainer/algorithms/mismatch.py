# pyright: basic, reportMissingImports=false
"""Mismatch between the trainer's policy and the policy that generated the tokens: staleness plus numeric differences.

All functions take flat trained tokens: ``old_logprobs`` and ``behavior_logprobs`` [T]. Every result is a sum or a
maximum over tokens, so that passes and ranks add up to the batch.
"""

import torch
from torch import Tensor

from staleflow.clients.trainer.algorithms.advantages import Reduction
from staleflow.clients.trainer.algorithms.losses import MAX_LOG_RATIO


def _log_ratio(old_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    difference = old_logprobs.detach().to(torch.float64) - behavior_logprobs.detach().to(torch.float64)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class MismatchSums:
    """Statistics of ``w_t = pi_old(x_t) / pi_behaviour(x_t)``, ``x_t ~ pi_behaviour``, accumulated over forward passes.

    The weights are *untruncated*, so that a cap cannot hide the values that it cuts. Sums are kept for each age up to
    ``max_age``; older tokens count with that age.
    """

    def __init__(self, device: torch.device, max_age: int = 0) -> None:
        self._sums = torch.zeros((max_age + 1, 7), dtype=torch.float64, device=device)
        self._max = torch.zeros(1, dtype=torch.float64, device=device)

    def add(
        self, old_logprobs: Tensor, behavior_logprobs: Tensor, age: Tensor, *, truncated: Tensor, clipped: Tensor
    ) -> None:
        """Add tokens, all [T]: ``age`` int64 in versions; bool ``truncated``: their weight was capped; ``clipped``."""
        if old_logprobs.numel() == 0:
            return
        log_ratio = _log_ratio(old_logprobs, behavior_logprobs)
        weights = log_ratio.exp()
        k3 = weights - 1.0 - log_ratio
        parts = (torch.ones_like(weights), weights, weights**2, truncated, k3, -log_ratio, clipped)
        columns = torch.stack([part.to(torch.float64) for part in parts], dim=1)
        self._sums.index_add_(0, age.clamp(0, len(self._sums) - 1), columns)
        self._max = torch.maximum(self._max, weights.max().reshape(1))

    def values(self, reduce: Reduction) -> dict[str, float]:
        """Return mean, maximum, effective and capped share of the weights, and the divergence; 1, 1, 1, 0, 0 if empty::

            is_weight/ess = (sum w)^2 / (T * sum w^2)
            mismatch_kl   = mean(w_t - 1 - log w_t)            nats a token, KL(engine || trainer), never negative
            mismatch_k1   = mean(-log w_t)                     the same quantity, without weight on outliers

        For each age n with tokens, also ``.../age_n`` of ESS, both divergences, and the capped and clipped shares, and
        ``off_policy/share/age_n``, the share of the tokens.

        Source: Kish, Survey Sampling (1965), effective sample size of weighted data; Schulman, Approximating KL
        Divergence (2020), estimators k1 and k3.
        """
        sums = reduce.sum(self._sums)
        tokens, weights, squares, cut, k3, _, _ = sums.sum(dim=0).tolist()
        largest = float(reduce.max(self._max)[0])
        ages = dict[str, float]()
        for age, (count, total, square, capped, kl, k1, clipped) in enumerate(sums.tolist()):
            if count:
                ages[f"off_policy/share/age_{age}"] = count / tokens
                ages[f"mismatch_kl/age_{age}"] = kl / count
                ages[f"mismatch_k1/age_{age}"] = k1 / count
                ages[f"is_weight/ess/age_{age}"] = total**2 / (count * square)
                ages[f"is_weight/truncated/age_{age}"] = capped / count
                ages[f"clip/age_{age}"] = clipped / count
        if not tokens:
            weights = squares = tokens = largest = 1.0
        return {
            "mismatch_kl": k3 / tokens,
            "is_weight/mean": weights / tokens,
            "is_weight/max": largest,
            "is_weight/ess": weights**2 / (tokens * squares),
            "is_weight/truncated": cut / tokens,
        } | ages
