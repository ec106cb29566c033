"""Named tensors as the bytes that travel: C order, little endian."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from staleflow.protocols.wire.manifest import NBYTES, lay_out
from staleflow.protocols.wire.messages import Manifest, TensorEntry
from staleflow.protocols.wire.tensors import Array

_NUMPY = {"bool": "?", "float16": "<u2", "bfloat16": "<u2"}
"""Dtypes that NumPy gets as raw bits; it knows the others by name."""


class NamedTensors(Protocol):
    """Weights by name: a mapping, or an object that gathers them one by one at each iteration."""

    def items(self) -> Iterable[tuple[str, Array]]:
        """Yield the same names, order and bytes every time."""
        ...


class Tensor(NamedTuple):
    """One tensor with its bytes in C order, little endian."""

    name: str
    dtype: str
    """One of ``protocols.wire.manifest.NBYTES``."""
    shape: tuple[int, ...]
    data: memoryview

    def array(self) -> Array:
        """Return a NumPy view; float16 and bfloat16 as their bits in uint16."""
        return np.frombuffer(self.data, np.dtype(_NUMPY.get(self.dtype, self.dtype))).reshape(self.shape)


def tensor_of(name: str, array: Array) -> Tensor:
    """Return a view of the array if it is in C order, else a copy. Raise ``ValueError`` for an unsupported dtype."""
    dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
    if dtype not in NBYTES:
        raise ValueError(f"tensor {name} is {dtype}; it must be one of {', '.join(NBYTES)}")
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return Tensor(name, dtype, array.shape, little.reshape(-1).view(np.uint8).data)


def in_memory(weights: NamedTensors) -> bool:
    """Return True if all weights are in memory, so that iterating over them is free."""
    return isinstance(weights, Mapping)


def layout(weights: NamedTensors) -> Manifest:
    """Return the offset of each tensor, without reading any bytes and without digests."""
    tensors = (tensor_of(name, array) for name, array in weights.items())
    return lay_out((tensor.name, tensor.dtype, tensor.shape, "") for tensor in tensors)


def copy_into(places: Manifest, weights: NamedTensors, into: NDArray[np.uint8]) -> dict[str, Array]:
    """Copy the weights into ``into`` and return the copies. Raise ``ValueError`` if they do not match the layout."""
    copies: dict[str, Array] = {}
    for entry, (name, array) in zip(places.tensors, weights.items(), strict=True):
        if (actual := (name, array.shape, array.nbytes)) != (entry.name, entry.shape, entry.nbytes):
            raise ValueError(f"unexpected tensor {actual}; {(entry.name, entry.shape, entry.nbytes)} was announced")
        dtype = array.dtype.newbyteorder("<")
        copies[name] = np.ndarray(array.shape, dtype, into.data, entry.offset)
        np.copyto(copies[name], array)
    return copies


def with_digests(places: Manifest, digests: Iterable[str]) -> Manifest:
    """Return the layout with the digests of its tensors, in order."""
    tensors = zip(places.tensors, digests, strict=True)
    return lay_out((entry.name, entry.dtype, entry.shape, digest) for entry, digest in tensors)


def part(data: memoryview, entry: TensorEntry) -> memoryview:
    """Return the bytes of one tensor of a version."""
    return data[entry.offset : entry.offset + entry.nbytes]
