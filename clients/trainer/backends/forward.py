# pyright: basic, reportMissingImports=false
"""One forward pass over some rows of a batch, padded or packed: the log-probabilities of their completions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
"""Number of tokens per row in the checks of a model."""
_ROUNDING = 0.05
"""Maximum difference between two kernels, as a share of the largest logit: bfloat16 has steps of 0.008."""


def completion_logprobs(
    forward: Forward,
    batch: TrainBatch,
    which: NDArray[np.int64],
    device: torch.device,
    temperature: float,
    *,
    packing: bool,
    mask_padding: bool = True,
    boundaries: bool = False,
) -> Tensor:
    """Return float32 [T]: the completion tokens of the rows ``which``, in the order of ``objective.tokens_of``.

    ``mask_padding``: give a padded pass an attention mask, which most models do not need (``ignores_padding``).
    ``boundaries``: give a packed pass the ends of its rows (``Attention.takes_boundaries``).
    """
    if packing:
        return _packed(forward, batch, which, device, temperature, boundaries=boundaries)
    return _padded(forward, batch, which, device, temperature, mask_padding=mask_padding)


def isolates_packed_rows(
    forward: Forward,
    backward: Callable[[Tensor], None],
    embeddings: Any,
    device: torch.device,
    *,
    boundaries: bool = False,
) -> bool:
    """Return whether the model isolates two rows of one packed pass.

    ``backward`` adds the gradient of a scalar to the model's; ``embeddings``: its token embeddings.

    With isolation, the second row's output has exactly zero gradient in the first row's embeddings, since masked
    attention has weight 0, not about 0. (The second row's values may still differ in their last bits with the first
    row's tokens, where these determine how many tokens an expert processes.)
    """
    ids = torch.arange(2 * _PROBE, device=device) % embeddings.num_embeddings
    positions = torch.arange(_PROBE, device=device).repeat(2)[None]
    ends = _ends(np.array([_PROBE, _PROBE], np.int64), device) if boundaries else {}
    with _gradient_reaches(embeddings, 0, slice(_PROBE)) as reached:
        logits = forward(input_ids=ids[None], position_ids=positions, **ends)
        backward(logits[0, _PROBE:].float().sum())
    isolated = bool(reached) and not any(reached)
    if boundaries:  # these alone isolate the rows; a model that ignores positions would still count on from row to row
        with torch.no_grad():
            isolated &= not torch.equal(forward(input_ids=ids[None], position_ids=2 * positions, **ends), logits)
    return isolated


def ignores_padding(
    forward: Forward, backward: Callable[[Tensor], None], embeddings: Any, device: torch.device
) -> bool:
    """Return whether a pass without attention mask gives a right-padded row the same output as one with a mask.

    True for causal models: a row's padding comes after its tokens. Without a mask, sdpa keeps grouped key heads and may
    use its flash kernels. Arguments as for ``isolates_packed_rows``. The output must have exactly zero gradient in the
    embeddings of the padding; it may differ by rounding from that of a masked pass, which may use another kernel.
    """
    ids = (torch.arange(4 * _PROBE, device=device) % embeddings.num_embeddings).view(2, -1)
    mask = torch.ones_like(ids)
    mask[1, _PROBE:] = 0
    with torch.no_grad():
        masked = forward(input_ids=ids, attention_mask=mask)[mask.bool()].float()
    with _gradient_reaches(embeddings, 1, slice(_PROBE, None)) as reached:
        plain = forward(input_ids=ids)[mask.bool()].float()
        backward(plain.sum())
    limit = _ROUNDING * max(1.0, float(masked.abs().max()))
    return bool(reached) and not any(reached) and float((plain.detach() - masked).abs().max()) <= limit


@contextmanager
def _gradient_reaches(embeddings: Any, row: int, places: slice) -> Iterator[list[bool]]:
    """Record for each backward pass whether the output depends on the embeddings at these places of a row."""
    reached: list[bool] = []

    def look(_: object, __: object, output: Any) -> None:
        output.register_hook(lambda gradient: reached.append(bool(gradient[row, places].any())))

    hook = embeddings.register_forward_hook(look)
    try:
        yield reached
    finally:
        hook.remove()


def _padded(
    forward: Forward,
    batch: TrainBatch,
    which: NDArray[np.int64],
    device: torch.device,
    temperature: float,
    *,
    mask_padding: bool,
) -> Tensor:
    width = int(batch.sequence_lengths[which].max())
    input_ids = rows(batch.input_ids, which, width, device)
    mask = {"attention_mask": rows(batch.attention_mask, which, width, device)} if mask_padding else {}
    logits = forward(input_ids=input_ids, **mask)
    return token_logprobs(logits, input_ids, temperature)[rows(batch.completions, which, width, device)]


def _packed(
    forward: Forward,
    batch: TrainBatch,
    which: NDArray[np.int64],
    device: torch.device,
    temperature: float,
    *,
    boundaries: bool,
) -> Tensor:
    """Concatenate all rows into one. Positions restart with every row, by which ``transformers`` isolates the rows in
    most architectures (``isolates_packed_rows``); with ``boundaries``, no mask is built."""
    lengths = batch.sequence_lengths[which]
    inside = np.arange(batch.input_ids.shape[1]) < lengths[:, None]
    positions = np.broadcast_to(np.arange(batch.input_ids.shape[1]), inside.shape)[inside]

    def flat(column: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(device)[None]

    input_ids = flat(batch.input_ids[which][inside])
    logits = forward(
        input_ids=input_ids, position_ids=flat(positions), **(_ends(lengths, device) if boundaries else {})
    )
    # The first token of a row is "predicted" by the row before it, but belongs to a prompt and is excluded here.
    return token_logprobs(logits, input_ids, temperature)[flat(batch.completions[which][inside])]


def _ends(lengths: NDArray[np.int64], device: torch.device) -> dict[str, Any]:
    """Return the ends of the rows of a packed pass, as ``transformers`` passes them to flash attention."""
    ends = torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32)).to(device)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
