# pyright: basic, reportMissingImports=false
"""Attention over packed trajectories without a dense mask: each trajectory attends to itself alone.

The sdpa attention of ``transformers`` masks a packed row of T tokens with T x T numbers and computes masked scores too.
Here, torch's variable-length flash attention takes the whole row on a GPU in half precision. Elsewhere, sdpa takes one
trajectory after the other, so that it needs no mask and keeps grouped key heads.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "staleflow_packed"
_MAX_HEAD_SIZE = 256
"""Limit of the flash kernels."""


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend like any ``transformers`` implementation: query [1, heads, T, size] to output [1, T, heads, size].

    ``cu_seq_lens_q`` int32 [trajectories + 1] has the ends of the trajectories, as flash attention takes them, and
    ``max_length_q`` the length of the longest. Without them, or with a mask, this is sdpa.
    """
    kwargs |= {"dropout": dropout, "scaling": scaling}
    if cu_seq_lens_q is None or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if query.is_cuda and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= _MAX_HEAD_SIZE:
        assert max_length_q is not None
        packed = (states[0].transpose(0, 1) for states in (query, key, value))
        attend: Any = varlen_attn
        output = attend(
            *packed,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),  # tokens before the query's own
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    parts = [
        sdpa_attention_forward(module, q, k, v, _window(sliding_window, q), **kwargs)[0]
        for q, k, v in zip(*(torch.split(states, lengths, 2) for states in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=1), None


def packed_mask(
    *, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, use_vmap: bool = False, **arguments: Any
) -> Tensor | None:
    """Return no mask for a packed pass, and that of sdpa for others and for models that add a rule of their own.

    ``transformers`` sets ``allow_is_causal_skip`` to False for positions that restart, ``use_vmap`` for such a rule.
    """
    if attention_mask is None and not allow_is_causal_skip and not use_vmap:
        return None
    return sdpa_mask(
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        **arguments,
    )


_uncompiled: Any = torch.compiler.disable
# The number of trajectories and their lengths differ from pass to pass.
AttentionInterface.register(NAME, _uncompiled(packed_attention))
AttentionMaskInterface.register(NAME, packed_mask)


def use_packed_attention(model: Any) -> bool:
    """Replace a model's sdpa attention by this one; return whether the model supports it.

    Models with flash attention in ``transformers`` give it what this one needs: the ends of the trajectories and the
    sliding window of each layer, which no mask shows here.
    """
    config = model.config.get_text_config()
    suitable = (
        config._attn_implementation == "sdpa" and model._supports_flash_attn and getattr(config, "is_causal", True)
    )
    if suitable:
        config._attn_implementation = NAME
    return suitable


def _window(size: int | None, query: Tensor) -> Tensor | None:
    """Return a causal mask for a trajectory that exceeds the sliding window: each token and ``size - 1`` before it."""
    length = query.shape[2]
    if size is None or length <= size:
        return None
    places = torch.arange(length, device=query.device)
    distance = places[:, None] - places
    return ((distance >= 0) & (distance < size))[None, None]
