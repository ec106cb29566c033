# pyright: basic, reportMissingImports=false
"""One forward pass over some rows of a batch, padded or packed: the log-probabilities of their completions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.models.likelihood import token_logprobs
from staleflow.clients.trainer.backends.tensors import rows
from staleflow.clients.trainer.data.batch import TrainBatch

Forward = Callable[..., Tensor]
"""Map ``input_ids`` and related inputs to logits."""
_PROBE = 8
"""Number of tokens per row in the check of a model's packing."""


def completion_logprobs(
    forward: Forward,
    batch: TrainBatch,
    which: NDArray[np.int64],
    device: torch.device,
    temperature: float,
    *,
    packing: bool,
) -> Tensor:
    """Return float32 [T]: the completion tokens of the rows ``which``, in the order of ``objective.tokens_of``."""
    return (_packed if packing else _padded)(forward, batch, which, device, temperature)


def isolates_packed_rows(
    forward: Forward, backward: Callable[[Tensor], None], embeddings: Any, device: torch.device
) -> bool:
    """Return whether the model isolates two rows of one packed pass.

    ``backward`` adds the gradient of a scalar to the model's; ``embeddings``: its token embeddings.

    With isolation, the second row's output has exactly zero gradient in the first row's embeddings, since masked
    attention has weight 0, not about 0. (The second row's values may still differ in their last bits with the first
    row's tokens, where these determine how many tokens an expert processes.)
    """
    reached: list[bool] = []

    def look(_: object, __: object, output: Any) -> None:
        output.requires_grad_(True)  # not set if the embeddings are frozen, below an adapter
        output.register_hook(lambda gradient: reached.append(bool(gradient[0, :_PROBE].any())))

    hook = embeddings.register_forward_hook(look)
    try:
        ids = torch.arange(2 * _PROBE, device=device) % embeddings.num_embeddings
        logits = forward(input_ids=ids[None], position_ids=torch.arange(_PROBE, device=device).repeat(2)[None])
        backward(logits[0, _PROBE:].float().sum())
    finally:
        hook.remove()
    return bool(reached) and not any(reached)


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
    """Concatenate all rows into one. Positions restart with every row, by which ``transformers`` isolates the rows,
    with a block-diagonal causal mask (sdpa, eager) or variable lengths (flash attention), in most architectures
    (``isolates_packed_rows``)."""
    lengths = batch.sequence_lengths[which]
    inside = np.arange(batch.input_ids.shape[1]) < lengths[:, None]
    positions = np.broadcast_to(np.arange(batch.input_ids.shape[1]), inside.shape)[inside]

    def flat(column: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(device)[None]

    input_ids = flat(batch.input_ids[which][inside])
    logits = forward(input_ids=input_ids, position_ids=flat(positions))
    # The first token of a row is "predicted" by the row before it, but belongs to a prompt and is excluded here.
    return token_logprobs(logits, input_ids, temperature)[flat(batch.completions[which][inside])]
