# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="misc,no-untyped-call"
"""Count the bytes that a process of vLLM reads from published weights: the ``worker_extension_cls`` of a test."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

from staleflow.clients.rollout.engines.vllm import receiver
from staleflow.clients.rollout.engines.vllm.plugin import BACKEND
from staleflow.clients.weights.mmap_cache import KeptMaps

_mapped = receiver.mapped


class CountReads(TorchDispatchMode):
    """Count what operations read from the maps. Views read nothing, nor do copies to ``meta``."""

    nbytes = 0
    maps: ClassVar = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if not is_view and not any(one.is_meta for one in tensors):
            read = [one for one in tensors if one.untyped_storage().data_ptr() in CountReads.maps]
            CountReads.nbytes += sum(one.numel() * one.element_size() for one in read)
        return func(*args, **(kwargs or {}))


def mapped(places: receiver.ParcelInfo, maps: KeptMaps) -> Iterator[tuple[str, torch.Tensor]]:
    """Note the memory of each tensor."""
    for name, tensor in _mapped(places, maps):
        CountReads.maps.add(tensor.untyped_storage().data_ptr())
        yield name, tensor


class CountingWeights(receiver.FileWeights):
    """The receiver, counting. Layers with padding are copied at the end of an update."""

    def start_weight_update(self) -> None:
        CountReads.nbytes = 0
        super().start_weight_update()

    def receive_weights(self, update_info: receiver.ParcelInfo) -> None:
        with CountReads():
            super().receive_weights(update_info)

    def finish_weight_update(self) -> None:
        with CountReads():
            super().finish_weight_update()


receiver.mapped = mapped
Factory._registry.pop(BACKEND)
Factory.register_engine(BACKEND, __name__, CountingWeights.__name__)


class Reads:
    """Adds a method to each worker."""

    def read_nbytes(self) -> int:
        """Return the bytes that this rank read in the last update."""
        return CountReads.nbytes
