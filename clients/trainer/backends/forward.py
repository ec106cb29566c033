# pyright: basic, reportMissingImports=false
"""One forward pass over some rows of a batch, padded or packed, and the log-probabilities of their completions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.trainer.algorithms.likelihood import token_logprobs
from staleflow.clients.trainer.backends.tensors import rows
from staleflow.clients.trainer.data.batch import TrainBatch

Forward = Callable[..., Tensor]
"""From ``input_ids`` and what belongs to them to logits."""
_PROBE = 8
"""Tokens of each row with which a model is tried out."""


def completion_logprobs(
    forward: Forward,
    batch: TrainBatch,
    which: NDArray[np.int64],
    device: torch.device,
    temperature: float,
    *,
    packing: bool,
) -> Tensor:
    """float32 [T]: of the completion tokens of the rows ``which``, in the order of ``objective.tokens_of``."""
    return (_packed if packing else _padded)(forward, batch, which, device, temperature)


def keeps_apart(forward: Forward, backward: Callable[[Tensor], None], embeddings: Any, device: torch.device) -> bool:
    """Whether the model keeps two rows of one packed pass apart. ``backward`` adds the gradient of a scalar to the
    model's; ``embeddings``: its own, of the tokens.

    What the second row computes has no gradient in the first row's embeddings then, exactly: attention that is masked
    has the weight 0, not about 0. (The second row's values themselves may differ in their last bits with the first
    row's tokens, where these choose how many tokens an expert has.)
    """
    seen: list[bool] = []

    def look(_: object, __: object, found: Any) -> None:
        found.register_hook(lambda gradient: seen.append(bool(gradient[0, :_PROBE].any())))

    hook = embeddings.register_forward_hook(look)
    try:
        ids = torch.arange(2 * _PROBE, device=device) % embeddings.num_embeddings
        logits = forward(input_ids=ids[None], position_ids=torch.arange(_PROBE, device=device).repeat(2)[None])
        backward(logits[0, _PROBE:].float().sum())
    finally:
        hook.remove()
    return bool(seen) and not any(seen)


def _padded(
    forward: Forward, batch: TrainBatch, which: NDArray[np.int64], device: torch.device, temperature: float
) -> Tensor:
    width = int(batch.sequence_lengths[which].max())
    input_ids = rows(batch.input_ids, which, width, device)
    logits = forward(input_ids=input_ids, attention_mask=rows(batch.attention_mask, which, width, device))
    return token_logprobs(logits, input_ids, temperature)[rows(batch.completions, which, width, device)]


def _packed(
    forward: Forward, batch: TrainBatch, which: NDArray[np.int64], device: torch.device, temperature: float
) -> Tensor:
    """All rows behind each other in one. Positions start anew with every row: by these ``transformers`` keeps the rows
    apart, with a block-diagonal causal mask (sdpa, eager) or variable lengths (flash attention), in most architectures
    (``keeps_apart``)."""
    lengths = batch.sequence_lengths[which]
    there = np.arange(batch.input_ids.shape[1]) < lengths[:, None]
    positions = np.broadcast_to(np.arange(batch.input_ids.shape[1]), there.shape)[there]

    def flat(column: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(device)[None]

    input_ids = flat(batch.input_ids[which][there])
    logits = forward(input_ids=input_ids, position_ids=flat(positions))
    # the first token of a row is "predicted" by the row before it; it is a prompt's, and left out here
    return token_logprobs(logits, input_ids, temperature)[flat(batch.completions[which][there])]
