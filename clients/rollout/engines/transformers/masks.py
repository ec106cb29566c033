# pyright: basic, reportMissingImports=false
"""Attention masks for a decode step over a ``SlotCache``."""

from typing import Any

import torch

from staleflow.clients.rollout.engines.transformers.grouped_attention import SERVED
from staleflow.configs.errors import ConfigError

UNSUPPORTED_TYPES = frozenset((
    "bloom", "falcon", "gpt_neo", "moshi", "openai-gpt",
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart", "trocr",
    "whisper",
))  # fmt: skip
"""Model types for which cached decoding with external masks and positions differs from one whole pass.

Their configs do not name their windows, their cache counts positions, they use another cache, or they attend to both
sides.
"""


class DecodeMasks:
    """Masks for the rows of a decode step, added to the attention scores."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        if config.model_type in UNSUPPORTED_TYPES or getattr(model, "_is_stateful", False):
            allowed = 'another model, or rollout.engine "vllm" with trainer.eval_prompts 0'
            why = "this engine would not write what the trainer reads"
            raise ConfigError("the type of model.path", config.model_type, f"{allowed}: {why}")
        self._dtype = model.dtype
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None)
        self._single_mask = not types
        """Such a model takes one mask for all layers instead of one per kind of layer."""
        self._kinds = sorted(set(types or ["sliding_attention" if window else "full_attention"]))
        self._window = window or 1 << 62
        unknown = [kind for kind in self._kinds if kind not in ("full_attention", "sliding_attention")]
        if unknown or config._attn_implementation not in ("eager", *SERVED):
            raise ConfigError(
                f"attention of {config.model_type}",
                ", ".join(unknown) or config._attn_implementation,
                "this engine knows full_attention and sliding_attention, computed by sdpa or eager",
            )

    def decode(self, positions: torch.Tensor, width: int) -> Any:
        """Return masks ``[rows, 1, 1, width]``: 0 up to and including each row's position, one per kind of layer."""
        columns = torch.arange(width, device=positions.device)
        masks = {}
        for kind in self._kinds:
            hidden = columns[None] > positions[:, None]
            if kind == "sliding_attention":
                hidden |= columns[None] <= positions[:, None] - self._window
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(self._dtype).min)[:, None, None]
        if self._single_mask:
            return masks[self._kinds[0]]
        return masks if len(masks) > 1 or "full_attention" not in masks else masks["full_attention"]
