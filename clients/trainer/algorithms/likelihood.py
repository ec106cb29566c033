# pyright: basic, reportMissingImports=false
"""Log-probabilities of given tokens under a model."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

PART_BYTES = 64 << 20
"""Of the scores that are in float32 at once: some hundred tokens of a large vocabulary."""


def token_logprobs(logits: Tensor, input_ids: Tensor, temperature: float) -> Tensor:
    """Log-probability of each token given those before it, with the engine's sampling temperature.

    ``logits`` [N, L, V] (position t predicts token t + 1), ``input_ids`` [N, L] -> [N, L] float32; position t holds
    the log-probability *of token t*, as the engine reports it, and position 0, which nothing predicts, holds 0::

        logp_t = z_t[x_t] - logsumexp(z_t),  z_t = logits_{t-1} / temperature

    Computed in float32 whatever the model computes in: sums over a vocabulary in bfloat16 are off by more than a step
    of training changes. Part by part, forth and back: beside ``logits`` and their gradient nothing is as large as they.
    """
    following = torch.roll(input_ids, -1, 1).flatten()
    logprobs: Tensor = _Logprobs.apply(logits.flatten(0, 1), following, temperature)  # type: ignore[no-untyped-call]
    return torch.nn.functional.pad(logprobs.view(input_ids.shape)[:, :-1], (1, 0))


class _Logprobs(torch.autograd.Function):
    """``logits`` [M, V] and ``tokens`` [M] -> [M] float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        chosen = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
        totals = torch.empty_like(chosen)
        for part in _parts(logits):
            scores = _scores(logits[part], temperature)
            chosen[part] = scores.gather(-1, tokens[part, None]).squeeze(-1)
            totals[part] = torch.logsumexp(scores, dim=-1)
        ctx.save_for_backward(logits, tokens, totals)
        ctx.temperature = temperature
        return chosen - totals

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens, totals = ctx.saved_tensors
        (gradient,) = gradients
        found = torch.empty_like(logits)
        for part in _parts(logits):
            there = gradient[part, None]
            slopes = _scores(logits[part], ctx.temperature).sub_(totals[part, None]).exp_().mul_(-there)
            found[part] = slopes.scatter_add_(-1, tokens[part, None], there).div_(ctx.temperature)
        return found, None, None


def _scores(logits: Tensor, temperature: float) -> Tensor:
    """A copy in float32."""
    return logits.to(torch.float32, copy=True).div_(temperature)


def _parts(logits: Tensor) -> Iterator[slice]:
    rows = max(1, PART_BYTES // (4 * logits.shape[-1]))
    return (slice(first, first + rows) for first in range(0, len(logits), rows))
