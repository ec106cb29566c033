# pyright: basic, reportMissingImports=false, reportPrivateImportUsage=false, reportArgumentType=false
"""Stand-ins for the two parts of TRL's asynchronous GRPO that need a GPU, so that it can be tried on a CPU.

TRL folds the samples of a micro-batch into one row, in which common prefixes are stored once, and computes its
attention with FlashAttention 3. ``packed_attention`` computes the same in PyTorch, segment by segment. TRL also looks
up the peak performance of the GPU, for a metric.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing


def use_cpu() -> None:
    """Replace both parts in this process. Call it before ``AsyncGRPOTrainer`` is created."""
    packing.tree_attention = packed_attention
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from each segment of the row to the tokens on its path; ``query``, ``key``, ``value`` are [1, H, N, D].

    Segment ``s`` is the tokens ``tree_cu_seqlens_q[s:s + 2]``. Its path, which ends with the segment itself, is the
    part ``tree_cu_seqlens_k[s:s + 2]`` of ``tree_kv_index``. Return [1, N, H, D].
    """
    if softcap:
        raise NotImplementedError(f"attention with softcap={softcap} needs a GPU, where TRL's own kernel runs")
    ends_q, ends_k = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    parts: list[torch.Tensor] = []
    for place in range(len(ends_q) - 1):
        rows = slice(ends_q[place], ends_q[place + 1])
        path = tree_kv_index[ends_k[place] : ends_k[place + 1]]
        part = scaled_dot_product_attention(
            query[:, :, rows],
            key[:, :, path],
            value[:, :, path],
            attn_mask=_causal(rows.stop - rows.start, len(path), sliding_window),
            scale=scaling,
            enable_gqa=True,
        )
        parts.append(part)
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _causal(num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
    """Return the mask [queries, keys] of queries that are the last ones of the keys."""
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    allowed = distance >= 0
    return allowed & (distance < window) if window else allowed
