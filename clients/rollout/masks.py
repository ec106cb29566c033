# pyright: basic, reportMissingImports=false
"""Attention masks of a decode step over a ``SlotCache``."""

from typing import Any

import torch

from staleflow.configs.errors import ConfigError


class Masks:
    """What the rows of a decode step may look at, added to the attention scores."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._dtype = model.dtype
        self._kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
        self._window = getattr(config, "sliding_window", None) or 1 << 62
        unknown = [kind for kind in self._kinds if kind not in ("full_attention", "sliding_attention")]
        if unknown or config._attn_implementation not in ("eager", "sdpa"):
            raise ConfigError(
                f"attention of {config.model_type}",
                ", ".join(unknown) or config._attn_implementation,
                "this engine knows full_attention and sliding_attention, computed by sdpa or eager",
            )

    def decode(self, positions: torch.Tensor, width: int) -> Any:
        """``[rows, 1, 1, width]``: 0 up to and with each row's own position; one for each kind of layer."""
        columns = torch.arange(width, device=positions.device)
        masks = {}
        for kind in self._kinds:
            hidden = columns[None] > positions[:, None]
            if kind == "sliding_attention":
                hidden |= columns[None] <= positions[:, None] - self._window
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(self._dtype).min)[:, None, None]
        return masks if len(masks) > 1 or "full_attention" not in masks else masks["full_attention"]
