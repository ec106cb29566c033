# pyright: basic, reportMissingImports=false
"""Load the tensors of a published version into a model, in place: all of them or none."""

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from staleflow.clients.models.lora import BASE, published
from staleflow.clients.rollout.engines.base import LoadError


def copy_weights(model: Any, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Copy ``tensors`` into the model after ``check_weights`` accepts them. On its error nothing is copied."""
    check_weights(model, tensors)
    own = published(model)
    with torch.no_grad():
        for name, array in tensors.items():
            _copy(own[name].detach(), array)


def check_weights(model: Any, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Raise ``LoadError`` unless ``tensors`` are exactly what a version of this model holds, matched by name.

    The model may be on ``meta``. Tied weights may appear once or under each name. bfloat16 and float16 arrive as their
    bits in uint16. The error names the first tensor that is missing, unknown, or of another shape or dtype. An adapter
    of another base model is refused, even if all its tensors fit.
    """
    own = published(model)  # tied weights are one object under two names
    if BASE in own and BASE in tensors and (theirs := tensors[BASE].tobytes()) != (ours := own[BASE].numpy().tobytes()):
        raise LoadError(
            f"the adapter was trained over a base model with digest {theirs.hex()}; the one of this engine has "
            f"{ours.hex()}: every machine needs the same files in its model directory"
        )
    filled: set[int] = set()
    for name, array in tensors.items():
        if name not in own:
            raise LoadError(f"tensor {name} is not one of the model's")
        target = own[name]
        if array.shape != tuple(target.shape) or array.dtype not in _bits(target.dtype):
            raise LoadError(
                f"tensor {name} is {array.dtype} {list(array.shape)}; the model has {target.dtype} {list(target.shape)}"
            )
        filled.add(id(target))
    for name, target in own.items():
        if id(target) not in filled:
            raise LoadError(f"tensor {name} is missing")


def one_name_each(model: Any, tensors: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return checked ``tensors`` in the model's order, with tied weights once, under the first of their names."""
    names: dict[int, list[str]] = {}
    for name, target in model.state_dict(keep_vars=True).items():
        names.setdefault(id(target), []).append(name)
    return {tied[0]: next(tensors[name] for name in tied if name in tensors) for tied in names.values()}


def _bits(dtype: torch.dtype) -> list[np.dtype[Any]]:
    """Return the NumPy dtypes in which a tensor of this dtype may arrive."""
    if dtype == torch.bfloat16:
        return [np.dtype(np.uint16)]
    own = torch.empty(0, dtype=dtype).numpy().dtype
    return [own, np.dtype(np.uint16)] if own == np.float16 else [own]


def _copy(target: torch.Tensor, array: np.ndarray[Any, Any]) -> None:
    """Copy ``array`` into ``target``. ``array`` may be a read-only map of a file, for which torch would warn."""
    if array.dtype == np.uint16:  # bits
        target = target.view(torch.uint16)
    if target.device.type == "cpu":
        np.copyto(target.numpy(), array)
    else:
        target.copy_(over(array))


def over(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor over the bytes of an array in C order, which may be read-only: the tensor must not be written.

    ``torch.from_numpy`` warns for such an array. A copy, for a GPU, would double what the host does during a load.
    """
    if array.size == 0 or not array.flags.c_contiguous:
        return torch.from_numpy(np.array(array))
    memory = memoryview((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data))
    return torch.from_numpy(np.frombuffer(memory, array.dtype).reshape(array.shape))
