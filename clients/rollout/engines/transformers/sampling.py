# pyright: basic, reportMissingImports=false
"""Sample tokens and their log-probabilities from logits.

The order of the steps is vLLM's: repetition penalty, frequency and presence penalty, temperature, min-p, top-k, top-p.
Log-probabilities are those of the distribution that remains, normalised over the tokens that survive.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from staleflow.clients.rollout.engines.base import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """Parameters of ``Sampling`` for each row of the logits, as arrays [rows]."""

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    repetition_penalty: np.ndarray
    frequency_penalty: np.ndarray
    presence_penalty: np.ndarray
    prompt: Callable[[int], np.ndarray]
    """Return the token ids of a row's prompt. Called for rows with a penalty only."""
    completion: Callable[[int], np.ndarray]
    """Return the token ids of a row's completion so far. Called for rows with a penalty only."""


def draw(logits: torch.Tensor, sampling: RowSampling, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row of ``logits``, and return its log-probability in the distribution it was drawn from.

    Sampling inverts the distribution function at ``uniform``, so that a row's token depends only on that row.
    Temperature 0 selects the most likely token and reports its log-probability at temperature 1.
    """
    scores = shaped(logits.float(), sampling)
    greedy = sampling.temperature == 0
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


def shaped(scores: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    """Return the scores whose softmax is sampled from; tokens outside the truncated distribution have -inf."""
    repeats = np.flatnonzero(sampling.repetition_penalty != 1)
    counted = np.flatnonzero((sampling.frequency_penalty != 0) | (sampling.presence_penalty != 0))
    truncated = np.flatnonzero((sampling.top_p < 1) | (sampling.top_k > 0) | (sampling.min_p > 0))
    if len(repeats) or len(counted) or len(truncated):
        scores = scores.clone()
    for row in repeats.tolist():
        written = np.concatenate((sampling.prompt(row), sampling.completion(row)))
        _penalise(scores[row], written, float(sampling.repetition_penalty[row]))
    for row in counted.tolist():
        frequency, presence = float(sampling.frequency_penalty[row]), float(sampling.presence_penalty[row])
        _penalise_counts(scores[row], sampling.completion(row), frequency, presence)
    if (sampling.temperature != 1).any():
        scale = np.where(sampling.temperature == 0, 1, sampling.temperature).astype(np.float32)
        scores = scores / torch.from_numpy(scale).to(scores.device)[:, None]
    if len(truncated):
        rows = torch.from_numpy(truncated).to(scores.device)
        scores[rows] = _truncate(
            scores[rows], sampling.top_p[truncated], sampling.top_k[truncated], sampling.min_p[truncated]
        )
    return scores


def _penalise(scores: torch.Tensor, written: np.ndarray, penalty: float) -> None:
    """Penalise in place the tokens that prompt or completion contain (CTRL, arXiv 1909.05858, section 4.1).

    As in transformers and vLLM, negative scores are multiplied, so that the penalty never makes a token more likely.
    """
    token_ids = torch.from_numpy(np.unique(written).astype(np.int64)).to(scores.device)
    seen = scores[token_ids]
    scores[token_ids] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _penalise_counts(scores: torch.Tensor, completion: np.ndarray, frequency: float, presence: float) -> None:
    """Penalise in place the tokens of the completion, as OpenAI's API and vLLM define both penalties."""
    token_ids, counts = np.unique(completion, return_counts=True)
    penalties = torch.from_numpy((frequency * counts + presence).astype(np.float32)).to(scores.device)
    scores[torch.from_numpy(token_ids.astype(np.int64)).to(scores.device)] -= penalties


def _truncate(scores: torch.Tensor, top_p: np.ndarray, top_k: np.ndarray, min_p: np.ndarray) -> torch.Tensor:
    """Return the scores with -inf for tokens outside min-p, then top-k, then the nucleus of what is left."""
    p, k, share = (torch.from_numpy(values).to(scores.device)[:, None] for values in (top_p, top_k, min_p))
    ranked, token_ids = scores.sort(dim=-1, descending=True, stable=True)
    kept = ranked >= ranked[:, :1] + share.log()
    last = torch.where(k > 0, k, scores.shape[-1]).clamp_(max=scores.shape[-1]) - 1
    kept &= ranked >= ranked.gather(-1, last)
    probabilities = ranked.masked_fill(~kept, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    kept &= (before < p) | (p == 1)  # rounding may take the sum of all tokens beyond 1
    return scores.masked_fill(~torch.zeros_like(kept).scatter_(-1, token_ids, kept), -torch.inf)
