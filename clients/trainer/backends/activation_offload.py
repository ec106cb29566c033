# pyright: basic, reportMissingImports=false
"""Activations in main memory between a forward pass and its backward pass: ``trainer.offload_activations``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MIN_BYTES = 1 << 20
"""Smaller tensors stay: each copy has a latency of its own."""


@contextmanager
def activations_in_main_memory(model: Any, device: torch.device, *, min_bytes: int = MIN_BYTES) -> Iterator[None]:
    """Keep what passes of ``model`` save for their backward pass, and what is on ``device``, in main memory.

    Weights stay, though autograd saves them too. With gradient checkpointing, only the inputs of the layers are saved.
    Copies run in the order of the device's other work, so that no copy is read before it is complete.
    """
    weights = {_storage(parameter) for parameter in model.parameters()}
    pinned = device.type == "cuda"

    def pack(tensor: Tensor) -> tuple[Tensor, bool]:
        if tensor.device != device or tensor.nbytes < min_bytes or _storage(tensor) in weights:
            return tensor, False
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return copy.copy_(tensor, non_blocking=pinned), True

    def unpack(packed: tuple[Tensor, bool]) -> Tensor:
        tensor, moved = packed
        return tensor.to(device, non_blocking=pinned) if moved else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
