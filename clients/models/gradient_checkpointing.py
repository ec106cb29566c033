# pyright: basic, reportMissingImports=false
"""Gradient checkpointing: layers compute their activations again in the backward pass instead of storing them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

_ATEN: Any = torch.ops.aten
_EXPENSIVE = {
    getattr(_ATEN, name).default
    for name in (
        *("mm", "addmm", "bmm", "baddbmm"),
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
}
"""Matrix products and attention, nearly all of a layer's arithmetic."""


def checkpoint_gradients(model: Any, *, selective: bool = False) -> None:
    """Recompute activations in the backward pass, in eval mode, without dropout.

    ``selective``: keep the results of matrix products and attention, and recompute the rest from them.

    ``transformers`` checkpoints layers in train mode. The layers are therefore in train mode except while they
    compute, and so is ``model`` itself, as a flag; everything else stays in eval mode.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if selective:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _kept)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    model.training = True
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True
        layer._gradient_checkpointing_func = partial(_in_eval_mode, layer._gradient_checkpointing_func)


def _kept(_: object, operator: Any, *__: object, **___: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _in_eval_mode(checkpoint: Callable[..., Any], call: Any, *arguments: Any) -> Any:
    """Run ``checkpoint(call, ...)``; ``call`` is a partial of the layer's call, in the forward and backward pass."""
    layer = call.func.__self__

    def computed(*arguments: Any) -> Any:
        layer.training = False
        try:
            return call(*arguments)
        finally:
            layer.training = True

    return checkpoint(computed, *arguments)
