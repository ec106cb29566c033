# pyright: basic, reportMissingImports=false
"""Conversions between torch tensors and published arrays: NumPy, bfloat16 as its bits in uint16."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.trainer.backends.base import Weights
from staleflow.clients.weights.sharded import Span
from staleflow.clients.weights.tensors import tensor_of
from staleflow.protocols.wire.manifest import NBYTES, lay_out
from staleflow.protocols.wire.messages import Manifest


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


class Shard(NamedTuple):
    """A tensor of the model, and this rank's part of it: contiguous elements in C order."""

    name: str
    dtype: torch.dtype
    """Dtype of the published tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    """Number of elements before the part."""
    part: Tensor | None
    """The elements, of any dtype and shape; None or empty if this rank has none."""


class ModelShards:
    """The published weights of a sharded model, as this rank has them (``ShardedWeights``)."""

    def __init__(
        self, tensors: Callable[[], Iterable[tuple[str, Tensor]]], shards: Callable[[], Iterable[Shard]]
    ) -> None:
        """Both yield the same tensors in the same order: ``tensors`` gathers each one, ``shards`` does not."""
        self._tensors = tensors
        self._shards = shards

    def items(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Gather one tensor at a time; names and bytes are the same on each iteration until the next step."""
        for name, tensor in self._tensors():
            yield name, to_array(tensor)

    def layout(self) -> Manifest:
        """Return the place of every tensor, without digests."""
        return lay_out((shard.name, _wire_dtype(shard), shard.shape, "") for shard in self._shards())

    def spans(self) -> Iterator[Span]:
        """Yield this rank's bytes; each span is converted and copied to main memory when it is due."""
        for entry, shard in zip(self.layout().tensors, self._shards(), strict=True):
            if shard.part is not None and shard.part.numel():
                data = tensor_of(shard.name, to_array(shard.part.to(shard.dtype))).data
                yield Span(entry.offset + shard.start * NBYTES[entry.dtype], data)


def _wire_dtype(shard: Shard) -> str:
    dtype = str(shard.dtype).removeprefix("torch.")
    if dtype not in NBYTES:
        raise ValueError(f"tensor {shard.name} is {dtype}; it must be one of {', '.join(NBYTES)}")
    return dtype
