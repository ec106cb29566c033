# pyright: basic, reportMissingImports=false
"""Copies of a GPU's tensors in pinned main memory, for a version that is published while the next step trains.

The copies run on a stream of their own. Neither the trainer's thread nor the forward and backward passes wait for them;
only the optimizer's kernels do, and whatever reads the copies.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.trainer.backends.tensors import first_names, to_array


class HostCopy:
    """Pinned memory for one version, reused by every version. It belongs to the trainer's thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copies: dict[str, Tensor] = {}

    def start(self, tensors: Mapping[str, Any]) -> "CopiedWeights":
        """Start to copy every tensor over its last copy, of tied ones only the first name; return the copies."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        arrays: dict[str, NDArray[Any]] = {}
        with torch.cuda.stream(self._stream):
            for name, tensor in first_names(tensors).items():
                copy = self._copy_of(name, tensor)
                copy.copy_(tensor.detach(), non_blocking=True)
                arrays[name] = to_array(copy)
        self._copied.record(self._stream)
        return CopiedWeights(arrays, self._copied)

    def before_update(self) -> None:
        """Let the device wait for the copies before it changes the tensors."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def _copy_of(self, name: str, tensor: Tensor) -> Tensor:
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy


class CopiedWeights(Mapping[str, NDArray[Any]]):
    """``Weights`` whose first reader waits for the copies, in its own thread."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], copied: Any) -> None:
        self._arrays = arrays
        self._copied = copied

    def __getitem__(self, name: str) -> NDArray[Any]:
        self._copied.synchronize()
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
