# pyright: basic, reportMissingImports=false
"""From logits to tokens and their log-probabilities."""

import numpy as np
import torch

from staleflow.clients.rollout.engines.base import EngineError


def draw(logits: torch.Tensor, temperature: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One token a row of ``logits``, and its log-probability in the distribution that it was drawn from.

    Drawn by inversion of the distribution function at ``uniform``, so a row's token depends on its own row alone.
    Temperature 0 takes the most likely token and reports its log-probability at temperature 1.
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
        token_ids = token_ids.clamp_(max=scores.shape[-1] - 1)  # out of range only when a score is not a number
    drawn = logprobs.gather(-1, token_ids)[:, 0].cpu().numpy()
    if not np.isfinite(drawn).all():
        raise EngineError("the model's scores are not finite: its weights are broken")
    return token_ids[:, 0].cpu().numpy(), drawn
