# pyright: basic, reportMissingImports=false
"""One forward pass over some rows of a batch, padded or packed: the log-probabilities of their completions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.trainer.backends.output_layer import Forward, Score
from staleflow.clients.trainer.data.batch import TrainBatch

_PROBE = 8
"""Number of tokens per row in the checks of a model."""
_ROUNDING = 0.05
"""Maximum difference between two kernels, as a share of the largest logit: bfloat16 has steps of 0.008."""


def completion_logprobs(
    score: Score,
    batch: TrainBatch,
    which: NDArray[np.int64],
    device: torch.device,
    *,
    packing: bool,
    mask_padding: bool = True,
    boundaries: bool = False,
) -> Tensor:
    """Return float32 [T]: the completion tokens of the rows ``which``, in the order of ``objective.tokens_of``.

    ``mask_padding``: give a padded pass an attention mask, which most models do not need (``ignores_padding``).
    ``packing``: concatenate all rows into one. Positions restart with every row, by which ``transformers`` isolates the
    rows in most architectures (``isolates_packed_rows``). ``boundaries``: also give the model the ends of the rows
    (``Attention.takes_boundaries``).
    """
    lengths = batch.sequence_lengths[which]
    inside = np.arange(int(lengths.max())) < lengths[:, None]
    ids, completions = (column[which, : inside.shape[1]] for column in (batch.input_ids, batch.completions))
    inputs: dict[str, Any] = {}
    if packing:
        positions = np.broadcast_to(np.arange(inside.shape[1]), inside.shape)
        ids, completions, positions = (column[inside][None] for column in (ids, completions, positions))
        inputs["position_ids"] = positions
    elif mask_padding:
        inputs["attention_mask"] = inside.astype(np.int64)
    inputs["input_ids"] = ids
    targets = np.flatnonzero(completions)
    # The place before is of the same row, since a row starts with its prompt.
    inputs |= {"predicting": targets - 1, "targets": ids.ravel()[targets]}
    on_device = {name: torch.from_numpy(np.ascontiguousarray(value)).to(device) for name, value in inputs.items()}
    return score(**on_device, **(_ends(lengths, device) if packing and boundaries else {}))


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
        output.requires_grad_(True)  # not set if the embeddings are frozen, below an adapter
        output.register_hook(lambda gradient: reached.append(bool(gradient[row, places].any())))

    hook = embeddings.register_forward_hook(look)
    try:
        yield reached
    finally:
        hook.remove()


def _ends(lengths: NDArray[np.int64], device: torch.device) -> dict[str, Any]:
    """Return the ends of the rows of a packed pass, as ``transformers`` passes them to flash attention."""
    ends = torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32)).to(device)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
