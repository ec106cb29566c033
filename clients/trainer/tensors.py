# pyright: basic, reportMissingImports=false
"""Between torch tensors and what travels: NumPy arrays, bfloat16 as its bits in uint16."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.trainer.backend import Weights


def to_array(tensor: Tensor) -> NDArray[Any]:
    """A view where the tensor is contiguous in main memory, else a copy."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def to_arrays(tensors: Mapping[str, Any]) -> Weights:
    """Every tensor of a ``state_dict`` by name; of tied ones the first name only."""
    seen: set[tuple[int, torch.dtype, torch.Size, tuple[int, ...]]] = set()
    arrays: dict[str, NDArray[Any]] = {}
    for name, value in tensors.items():
        tensor = torch.as_tensor(value)
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in seen or tensor.numel() == 0:
            seen.add(place)
            arrays[name] = to_array(tensor)
    return arrays


def rows(array: NDArray[Any], which: NDArray[np.int64], width: int, device: torch.device) -> Tensor:
    """Some rows of a padded column, cut to ``width`` columns, on the device."""
    return torch.from_numpy(np.ascontiguousarray(array[which, :width])).to(device)
