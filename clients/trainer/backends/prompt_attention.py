# pyright: basic, reportMissingImports=false
"""Attention over a ``Sequence``: computed in blocks of runs, so that no mask has the size of the whole sequence."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from staleflow.clients.models.packed_attention import packed_mask
from staleflow.clients.trainer.backends.prompt_layout import Sequence

NAME = "staleflow_shared_prompts"
_NOT_COMPUTED = {
    "sliding_window": "sliding windows",
    "softcap": "capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "position biases",
}
"""Features of attention that ``shared_prompt_attention`` does not have, by the argument that a model gives for them."""


@dataclass(slots=True)
class Blocks:
    """The blocks of a sequence on the device."""

    blocks: list[tuple[Tensor, Tensor, Tensor]]
    """Queries [n, C], keys [n, K] and mask, as in ``Block``, or a causal bias in place of none."""
    attended: Tensor
    calls: int = 0
    """Number of attention layers that used the blocks."""
    not_computed: set[str] = field(default_factory=set[str])
    """Features that these layers asked for in vain."""


def blocks_of(sequence: Sequence, device: torch.device) -> Blocks:
    """Return the blocks of a sequence on the device."""
    return Blocks(
        blocks=[
            (
                torch.from_numpy(block.queries).to(device),
                torch.from_numpy(block.keys).to(device),
                # A bias cannot be created within a layer: selective checkpointing intercepts what layers create.
                _lower_right(block.queries.shape[1], block.keys.shape[1])
                if block.mask is None
                else torch.from_numpy(block.mask).to(device),
            )
            for block in sequence.blocks
        ],
        attended=torch.from_numpy(sequence.attended).to(device),
    )


def shared_prompt_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    shared_prompts: Blocks | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend like any ``transformers`` implementation; like sdpa in a pass without ``shared_prompts``.

    ``query`` is ``[1, heads, tokens, size]``, the output ``[1, tokens, heads, size]``.
    """
    if shared_prompts is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    shared_prompts.calls += 1
    # An exception would leave the collectives of a sharded model half done, so the check at start looks at the set.
    shared_prompts.not_computed.update(text for name, text in _NOT_COMPUTED.items() if kwargs.get(name) is not None)
    repeats = query.shape[1] // key.shape[1]
    # With a mask, a GPU's kernels need equal numbers of heads.
    grouped = repeats > 1 and query.device.type == "cpu" and not _fake_gpu
    if repeats > 1 and not grouped:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    queries, keys, values = (states[0].transpose(0, 1).flatten(1) for states in (query, key, value))

    def gather(tokens: Tensor, places: Tensor, size: int) -> Tensor:
        """Return [n, heads, length, size]."""
        return tokens.index_select(0, places.flatten()).view(*places.shape, -1, size).transpose(1, 2)

    outputs: list[Tensor] = []
    for own, seen, mask in shared_prompts.blocks:
        output = scaled_dot_product_attention(
            gather(queries, own, query.shape[-1]),
            gather(keys, seen, key.shape[-1]),
            gather(values, seen, value.shape[-1]),
            mask,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=grouped,
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, shared_prompts.attended)[None], None


_fake_gpu: bool | None = None
"""Within ``fake_tensors``: whether the tensors stand for those of a GPU."""


@contextmanager
def fake_tensors(*, gpu: bool) -> Iterator[None]:
    """Accept fake tensors on the CPU that stand for those of a GPU or a CPU."""
    global _fake_gpu
    _fake_gpu = gpu
    try:
        yield
    finally:
        _fake_gpu = None


def _lower_right(queries: int, keys: int) -> Tensor:
    if _fake_gpu is not None:  # torch's causal bias is a subclass that cannot be fake; a CPU computes with this mask
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return causal_lower_right(queries, keys)


_uncompiled: Any = torch.compiler.disable
# The number of blocks and their shapes differ from pass to pass.
AttentionInterface.register(NAME, _uncompiled(shared_prompt_attention))
AttentionMaskInterface.register(NAME, packed_mask)


@contextmanager
def sharing_attention(model: Any) -> Iterator[None]:
    """Use this attention, until after the backward passes, in which gradient checkpointing computes it again."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
