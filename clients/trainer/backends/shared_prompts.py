# pyright: basic, reportMissingImports=false
"""Passes that compute the prompt of a group once, instead of once for each sample."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.models.likelihood import token_logprobs
from staleflow.clients.out_of_memory import out_of_memory
from staleflow.clients.trainer.backends.output_layer import Forward, Score, from_logits
from staleflow.clients.trainer.backends.prompt_attention import blocks_of, sharing_attention
from staleflow.clients.trainer.backends.prompt_layout import BLOCK_AREA, Sequence, lay_out
from staleflow.clients.trainer.backends.router_replay import (
    UNSHARED_TOKENS,
    RouterReplay,
    packed_records,
    placed_records,
)
from staleflow.clients.trainer.data.batch import TrainBatch

_TOLERANCE = 1e-3
"""Maximum deviation of a shared pass from a padded one in float32, as a share of the values' own spread."""
_COARSE_TOLERANCE = 0.1
"""The same in bfloat16, whose rounding alone gives some hundredths."""


def shared_logprobs(
    score: Score,
    batch: TrainBatch,
    which: NDArray[np.int64],
    device: torch.device,
    *,
    replay: RouterReplay | None = None,
) -> Tensor:
    """Return what ``completion_logprobs`` returns; within ``sharing_attention``.

    ``replay``: each row then computes the last token of its prompt, where its first record applies.
    """
    lengths = batch.sequence_lengths[which]
    prompts = lengths - batch.completion_lengths[which]
    unshared = 0 if replay is None else UNSHARED_TOKENS
    sequence = lay_out(batch.input_ids[which], lengths, prompts, batch.group_ids[which], unshared=unshared)
    if replay is not None:
        replay.start(placed_records(packed_records(batch, which), sequence.places, len(sequence.input_ids)))
    return _logprobs(score, sequence, device)[0]


def _logprobs(score: Score, sequence: Sequence, device: torch.device) -> tuple[Tensor, Any]:
    def on_device(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    blocks = blocks_of(sequence, device)
    logprobs = score(
        input_ids=on_device(sequence.input_ids)[None],
        position_ids=on_device(sequence.positions)[None],
        shared_prompts=blocks,
        # The last token of a prompt predicts the first token of every sample, so its place appears several times.
        predicting=on_device(sequence.predicting),
        targets=on_device(sequence.targets),
    )
    return logprobs, blocks


def why_not_shared(model: Any, forward: Forward, backward: Callable[[Tensor], None], device: torch.device) -> str:
    """Return why this model cannot share prompts, or "" if it can.

    Compares the log-probabilities of two small groups and their gradient in the embeddings with those of a padded pass.
    ``backward`` adds the gradient of a scalar to the model's.
    """
    if reason := why_not_tried(model):
        return reason
    try:
        return _deviation(model, forward, backward, device)
    except Exception as error:
        if out_of_memory(error):
            raise
        return f"it raises {type(error).__name__}: {error}"


def why_not_tried(model: Any) -> str:
    """Return why the structure of this model rules out shared prompts, or "" if a comparison decides."""
    if not model.is_backend_compatible():
        return "its attention cannot be replaced"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - {"full_attention"}
    return f"it has layers of type {', '.join(sorted(kinds))}" if kinds else ""


def _deviation(model: Any, forward: Forward, backward: Callable[[Tensor], None], device: torch.device) -> str:
    lengths, prompts, groups = (np.array(values, np.int64) for values in ([8, 6, 7, 9], [5, 5, 3, 3], [0, 0, 1, 1]))
    random = np.random.default_rng(0)
    place = np.arange(lengths.max())
    embeddings = model.get_input_embeddings()
    input_ids = random.integers(0, embeddings.num_embeddings, (len(lengths), len(place)))
    input_ids[1::2] = np.where(place < prompts[1::2, None], input_ids[::2], input_ids[1::2])
    written = place < lengths[:, None]
    weights = torch.from_numpy(random.normal(size=int((lengths - prompts).sum()))).to(device, torch.float32)
    tolerance = _TOLERANCE if embeddings.weight.dtype == torch.float32 else _COARSE_TOLERANCE
    gradients: list[Tensor] = []

    def look(_: object, __: object, output: Any) -> None:
        output.requires_grad_(True)  # not set if the embeddings are frozen, below an adapter
        output.register_hook(lambda gradient: gradients.append(gradient.detach().float()))

    def on_device(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    hook = embeddings.register_forward_hook(look)
    try:
        ids = on_device(np.where(written, input_ids, 0))
        logits = forward(input_ids=ids, attention_mask=on_device(written.astype(np.int64)))
        padded = token_logprobs(logits, ids, 1.0)[on_device(written & (place >= prompts[:, None]))]
        backward((padded * weights).sum())
        for block_area in (0, BLOCK_AREA):
            sequence = lay_out(input_ids, lengths, prompts, groups, block_area=block_area)
            with sharing_attention(model):
                shared, blocks = _logprobs(from_logits(forward, 1.0), sequence, device)
                backward((shared * weights).sum())
            if blocks.not_computed:
                return f"it has {', '.join(sorted(blocks.not_computed))}"
            if not blocks.calls:
                return "its attention cannot be replaced"
            expected = torch.zeros_like(gradients[-1][0])
            expected.index_add_(0, on_device(sequence.places), gradients[0][on_device(written)])
            for what, found, wanted in (
                ("log-probabilities", shared.detach(), padded.detach()),
                ("gradient", gradients[-1][0], expected),
            ):
                deviation = float((found - wanted).norm() / (wanted - wanted.mean()).norm())
                if not deviation <= tolerance:
                    return f"its {what} would deviate by {deviation:.2g} of their spread"
    finally:
        hook.remove()
    return ""
