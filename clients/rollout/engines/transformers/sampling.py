# pyright: basic, reportMissingImports=false
"""Sample tokens and their log-probabilities from logits."""

import numpy as np
import torch

from staleflow.clients.rollout.engines.base import EngineError


def draw(logits: torch.Tensor, temperature: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row of ``logits``, and return its log-probability in the distribution it was drawn from.

    Sampling inverts the distribution function at ``uniform``, so that a row's token depends only on that row.
    Temperature 0 selects the most likely token and reports its log-probability at temperature 1.
    """
    scores = logits.float()
    greedy = temperature == 0
    if (temperature != 1).any():
        scale = torch.from_numpy(np.where(greedy, 1, temperature).astype(np.float32)).to(scores.device)
        scores = scores / scale[:, None]
    logprobs = scores.log_softmax(-1)
    if greedy.all():
        token_ids = scores.argmax(-1, keepdim=True)
    else:
        below = logprobs.exp().cumsum(-1)
        target = torch.from_numpy(uniform).to(scores.device)[:, None] * below[:, -1:]
        token_ids = torch.searchsorted(below, target, right=True)
        if greedy.any():
            token_ids = torch.where(
                torch.from_numpy(greedy).to(scores.device)[:, None], scores.argmax(-1, keepdim=True), token_ids
            )
        token_ids = token_ids.clamp_(max=scores.shape[-1] - 1)  # only exceeds the range if a score is NaN
    drawn = logprobs.gather(-1, token_ids)[:, 0].cpu().numpy()
    if not np.isfinite(drawn).all():
        raise EngineError("the model's scores are not finite; its weights are corrupt")
    return token_ids[:, 0].cpu().numpy(), drawn
