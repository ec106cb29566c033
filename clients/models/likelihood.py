# pyright: basic, reportMissingImports=false
"""Log-probabilities of given tokens under a model."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MAX_PART_BYTES = 64 << 20
"""Maximum bytes of scores held in float32 at a time: some hundred tokens of a large vocabulary."""


def token_logprobs(logits: Tensor, input_ids: Tensor, temperature: float) -> Tensor:
    """Return the log-probability of each token given its predecessors, at the engine's sampling temperature.

    ``logits`` [N, L, V] (position t predicts token t + 1), ``input_ids`` [N, L] -> [N, L] float32. Position t holds
    the log-probability *of token t*, as the engine reports it; position 0 has no prediction and holds 0::

        logp_t = z_t[x_t] - logsumexp(z_t),  z_t = logits_{t-1} / temperature

    The computation uses float32 regardless of the model's dtype: in bfloat16, the error of a sum over the vocabulary
    exceeds the change of a training step. Forward and backward work in parts, so that no tensor besides ``logits`` and
    their gradient has their size.
    """
    following = torch.roll(input_ids, -1, 1).flatten()
    logprobs = target_logprobs(logits.flatten(0, 1), following, temperature)
    return torch.nn.functional.pad(logprobs.view(input_ids.shape)[:, :-1], (1, 0))


def target_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return [M] float32: the log-probability of ``targets`` [M] under ``logits`` [M, V], as in ``token_logprobs``."""
    logprobs: Tensor = _Logprobs.apply(logits, targets, temperature)  # type: ignore[no-untyped-call]
    return logprobs


class _Logprobs(torch.autograd.Function):
    """Map ``logits`` [M, V] and ``tokens`` [M] to [M] float32."""

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
        result = torch.empty_like(logits)
        for part in _parts(logits):
            upstream = gradient[part, None]
            slopes = _scores(logits[part], ctx.temperature).sub_(totals[part, None]).exp_().mul_(-upstream)
            result[part] = slopes.scatter_add_(-1, tokens[part, None], upstream).div_(ctx.temperature)
        return result, None, None


def _scores(logits: Tensor, temperature: float) -> Tensor:
    """Return a scaled copy in float32."""
    return logits.to(torch.float32, copy=True).div_(temperature)


def _parts(logits: Tensor) -> Iterator[slice]:
    rows = max(1, MAX_PART_BYTES // (4 * logits.shape[-1]))
    return (slice(first, first + rows) for first in range(0, len(logits), rows))
