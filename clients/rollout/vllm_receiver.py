# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="misc,no-untyped-call"
"""vLLM's side of a weight update, in the process that holds the model: tensors from files into the weights, in place.

A backend of vLLM's weight transfer interface. It gets places in files (``vllm_weights``), maps them, and lets the
model's own loader fuse, shard and repack: each rank of a tensor-parallel engine reads what it needs of the same file.
"""

import logging
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

# At every update it warns of layers for which nothing came: a tied head and the rotary embedding. What must come is
# checked by name before an update begins.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class Nothing(WeightTransferInitInfo):
    """No rendezvous is needed."""


@dataclass
class Places(WeightTransferUpdateInfo):
    """``vllm_weights.Parcel`` as it came through the engine's messages."""

    path: str
    tensors: list[list[Any]]
    """Name, NumPy dtype, shape, offset."""


class FileWeights(WeightTransferEngine[Nothing, Places]):
    """Weights from files of this host."""

    init_info_cls = Nothing
    update_info_cls = Places

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing is kept between updates."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Places) -> None:
        self.model.load_weights(mapped(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):  # tied to the embedding, for which alone weights came
                layer.quant_method.process_weights_after_loading(layer)  # on a CPU it multiplies by a packed copy

    def shutdown(self) -> None:
        """Nothing is held."""


def mapped(places: Places) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor as a map of its file. uint16 is bfloat16's bits; a private map, since torch wants one to write on."""
    with Path(places.path).open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for name, dtype, shape, offset in places.tensors:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(content, np.dtype(dtype), count, offset).reshape(shape)
        tensor = torch.from_numpy(array)
        yield name, tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
