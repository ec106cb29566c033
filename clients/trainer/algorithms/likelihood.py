# pyright: basic, reportMissingImports=false
"""Log-probabilities of given tokens under a model."""

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, input_ids: Tensor, temperature: float) -> Tensor:
    """Log-probability of each token given those before it, with the engine's sampling temperature.

    ``logits`` [N, L, V] (position t predicts token t + 1), ``input_ids`` [N, L] -> [N, L] float32; position t holds
    the log-probability *of token t*, as the engine reports it, and position 0, which nothing predicts, holds 0::

        logp_t = z_t[x_t] - logsumexp(z_t),  z_t = logits_{t-1} / temperature

    Computed in float32 whatever the model computes in: sums over a vocabulary in bfloat16 are off by more than a step
    of training changes.
    """
    scores = logits[:, :-1].to(torch.float32) / temperature
    chosen = scores.gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    logprobs = chosen - torch.logsumexp(scores, dim=-1)
    return torch.nn.functional.pad(logprobs, (1, 0))
