# pyright: basic
"""Weights as a safetensors file, bit by bit as they were published."""

import errno
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from staleflow.clients.weights.tensors import Tensor


def write(tensors: Iterable[Tensor], path: Path) -> None:
    """Write the tensors under their names. Raise ``OSError``, also if the disk is full."""
    try:
        save_file({tensor.name: _torch(tensor) for tensor in tensors}, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error


def _torch(tensor: Tensor) -> torch.Tensor:
    """Return a view of the bytes."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if not tensor.data.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # the file is written from it, no more
        return torch.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape)
