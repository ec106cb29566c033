# pyright: basic, reportMissingImports=false, reportPrivateImportUsage=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-call"
"""The attention for CPUs equals plain causal attention of each sample, on rows that TRL packs."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo.packing import TreeRow

from staleflow.examples.async_grpo.cpu import packed_attention

SAMPLES = ([1, 2, 3, 4, 5], [1, 2, 3, 7], [1, 2, 3, 4, 6, 8], [9, 2])
HEADS, SHARED, DEPTH = 4, 2, 8


@pytest.mark.parametrize("window", [None, 2])
def test_packed_attention_is_causal_attention_of_every_sample(window: int | None) -> None:
    row = TreeRow()
    for ids in SAMPLES:
        mask, zeros = np.ones(len(ids), np.int64), np.zeros(len(ids), np.float32)
        columns = {"input_ids": np.array(ids), "completion_mask": mask, "old_log_probs": zeros}
        row.add({**columns, "advantage": 1.0, "group_id": 0})
    packed = row.pack()
    num = len(packed["input_ids"])
    assert num < sum(map(len, SAMPLES)), "samples share their prefixes"
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, num, DEPTH) for heads in (HEADS, SHARED, SHARED))
    tree: dict[str, Any] = {name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    output, _ = packed_attention(None, query, key, value, None, **tree, sliding_window=window)
    for path in paths(packed):
        distance = path_distance(len(path))
        allowed = (distance >= 0) & (distance < (window or len(path)))
        alone = scaled_dot_product_attention(
            query[:, :, path], key[:, :, path], value[:, :, path], attn_mask=allowed, enable_gqa=True
        )
        torch.testing.assert_close(output[:, path], alone.transpose(1, 2))


def paths(packed: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the packed positions on the way to each segment."""
    return list(packed["tree_kv_index"].split(packed["tree_cu_seqlens_k"].diff().tolist()))


def path_distance(length: int) -> torch.Tensor:
    return torch.arange(length)[:, None] - torch.arange(length)
