# pyright: basic, reportMissingImports=false
"""Attention of a decode step without copying keys: the query heads that share a key head stand as its query rows.

``transformers``' own sdpa repeats keys and values for every query head, each step; with grouped heads that copy is most
of a small model's time. Passes over more than one token (prompts) go to sdpa as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "staleflow_grouped"


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
    """As any of ``transformers``: query ``[rows, heads, tokens, size]``, out ``[rows, tokens, heads, size]``."""
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
    """The model in eval mode with this attention; afterwards as it was, so that a trainer may own it."""
    config = model.config.get_text_config()
    attention = config._attn_implementation
    training = [module for module in model.modules() if module.training] if model.training else []
    if training:
        model.eval()
    if attention == "sdpa":
        config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = attention
        for module in training:
            module.training = True
