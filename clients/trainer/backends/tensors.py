# pyright: basic, reportMissingImports=false
"""Conversions between torch tensors and published arrays: NumPy, bfloat16 as its bits in uint16."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.trainer.backends.base import Weights


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Return a view if the tensor is contiguous in main memory, else a copy."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def to_arrays(tensors: Mapping[str, Any]) -> Weights:
    """Return every tensor of a ``state_dict`` by name; of tied ones only the first name."""
    return {name: to_array(tensor) for name, tensor in first_names(tensors).items()}


def first_names(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a ``state_dict``, each once: of tied ones only the first name."""
    yielded: set[tuple[int, torch.dtype, torch.Size, tuple[int, ...]]] = set()
    first: dict[str, Tensor] = {}
    for name, value in tensors.items():
        tensor = torch.as_tensor(value)
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in yielded or tensor.numel() == 0:
            yielded.add(place)
            first[name] = tensor
    return first


def named(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's own tensors by ``state_dict`` name, sharded or not; tied ones under their first name."""
    yielded: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in yielded:
            yielded.add(id(tensor))
            yield name, tensor


class StreamedWeights:
    """Weights that are gathered tensor by tensor during each iteration."""

    def __init__(self, tensors: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._tensors = tensors

    def items(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield one tensor at a time; names and bytes are the same on each iteration until the next step."""
        for name, tensor in self._tensors():
            yield name, to_array(tensor)
