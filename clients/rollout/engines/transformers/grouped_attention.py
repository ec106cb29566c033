# pyright: basic, reportMissingImports=false
"""Attention for a decode step without copying keys: query heads that share a key head become its query rows.

The sdpa attention of ``transformers`` repeats keys and values for every query head in each step. With grouped heads,
that copy takes most of a small model's time. Passes over more than one token (prompts) use sdpa unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from staleflow.clients.models.packed_attention import NAME as PACKED

NAME = "staleflow_grouped"
SERVED = ("sdpa", PACKED, "flash_attention_2", "flash_attention_3", "flex_attention")
"""Implementations of a trainer's model that this one replaces while an engine uses the model."""


def grouped_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: Any = 0.0,
    scaling: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attend like any ``transformers`` implementation.

    ``query`` is ``[rows, heads, tokens, size]``, the output ``[rows, tokens, heads, size]``.
    """
    rows, heads, tokens, size = query.shape
    if tokens != 1 or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    shared = key.shape[1]
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, shared, heads // shared, size), key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def serving(model: Any) -> Iterator[None]:
    """Put the model into eval mode with this attention, and restore it afterwards for a trainer that may own it."""
    config = model.config.get_text_config()
    attention = config._attn_implementation
    training = [module for module in model.modules() if module.training] if model.training else []
    if training:
        model.eval()
    if attention in SERVED:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = attention
        for module in training:
            module.training = True
