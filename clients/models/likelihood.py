# pyright: basic, reportMissingImports=false
"""Log-probabilities of given tokens under a model, and the entropy of the distributions that they come from."""

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


def target_logprobs(logits: Tensor, targets: Tensor, temperature: float, predicting: Tensor | None = None) -> Tensor:
    """Return [K] float32: the log-probability of each of ``targets`` [K], as in ``token_logprobs``.

    ``predicting`` int64 [K]: the row of ``logits`` [M, V] that predicts each target; by default, row by row (M = K).
    """
    logprobs: Tensor = _Logprobs.apply(logits, targets, temperature, predicting)  # type: ignore[no-untyped-call]
    return logprobs


def target_logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return [K, 2] float32: ``target_logprobs``, and the entropy of each target's distribution, with gradient::

        H_t = -sum_v p_t[v] * log p_t[v],  p_t = softmax(z_t)        in nats

    ``logits`` [K, V] predict the ``targets`` row by row. Forward and backward work in parts, as in ``token_logprobs``.
    """
    both: Tensor = _LogprobsEntropy.apply(logits, targets, temperature)  # type: ignore[no-untyped-call]
    return both


class _Logprobs(torch.autograd.Function):
    """Map ``logits`` [M, V] and ``targets`` [K] to [K] float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, predicting: Tensor | None) -> Tensor:
        chosen = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        totals = torch.empty_like(chosen)
        for part in _parts(len(targets), logits.shape[-1]):
            scores = _scores(logits[part if predicting is None else predicting[part]], temperature)
            chosen[part] = scores.gather(-1, targets[part, None]).squeeze(-1)
            totals[part] = torch.logsumexp(scores, dim=-1)
        ctx.save_for_backward(logits, targets, totals, predicting)
        ctx.temperature = temperature
        return chosen - totals

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, totals, predicting = ctx.saved_tensors
        (gradient,) = gradients
        result = torch.empty_like(logits) if predicting is None else torch.zeros_like(logits)
        for part in _parts(len(targets), logits.shape[-1]):
            upstream = gradient[part, None]
            scores = _scores(logits[part if predicting is None else predicting[part]], ctx.temperature)
            slopes = scores.sub_(totals[part, None]).exp_().mul_(-upstream)
            slopes.scatter_add_(-1, targets[part, None], upstream).div_(ctx.temperature)
            if predicting is None:
                result[part] = slopes
            else:
                result.index_add_(0, predicting[part], slopes.to(result.dtype))
        return result, None, None, None


class _LogprobsEntropy(torch.autograd.Function):
    """Map ``logits`` [M, V] and ``tokens`` [M] to [M, 2] float32: log-probabilities and entropies."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        result = torch.empty((*tokens.shape, 2), dtype=torch.float32, device=logits.device)
        totals = torch.empty_like(result[:, 0])
        for part in _parts(len(tokens), logits.shape[-1]):
            scores = _scores(logits[part], temperature)
            totals[part] = torch.logsumexp(scores, dim=-1)
            result[part, 0] = scores.gather(-1, tokens[part, None]).squeeze(-1) - totals[part]
            # entr is -p log p with its limit 0 at p = 0, so that a logit of -inf gives no NaN
            result[part, 1] = torch.special.entr(scores.sub_(totals[part, None]).exp_()).sum(-1)
        ctx.save_for_backward(logits, tokens, totals, result[:, 1])
        ctx.temperature = temperature
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """With g and h the gradients of log-probability and entropy: ``g (1[v = x] - p) - h p (log p + H)``."""
        logits, tokens, totals, entropies = ctx.saved_tensors
        (gradient,) = gradients
        result = torch.empty_like(logits)
        for part in _parts(len(tokens), logits.shape[-1]):
            upstream, bonus = gradient[part, :1], gradient[part, 1:]
            chances = _scores(logits[part], ctx.temperature).sub_(totals[part, None]).exp_()
            slopes = (
                torch.special.entr(chances).mul_(bonus).sub_(chances.mul_(upstream + bonus * entropies[part, None]))
            )
            result[part] = slopes.scatter_add_(-1, tokens[part, None], upstream).div_(ctx.temperature)
        return result, None, None


def _scores(logits: Tensor, temperature: float) -> Tensor:
    """Return a scaled copy in float32."""
    return logits.to(torch.float32, copy=True).div_(temperature)


def _parts(rows: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, MAX_PART_BYTES // (4 * vocabulary))
    return (slice(first, first + size) for first in range(0, rows, size))
