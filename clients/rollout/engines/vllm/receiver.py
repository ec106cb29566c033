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
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

NAMED = 5
"""Most parameters that an error names."""

# At every update it warns of layers for which nothing came: a tied head and the rotary embedding. Whether it is more
# than that, ``finish_weight_update`` finds out itself.
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
        self._tied = tied(self.model)
        """Names of one parameter: weights come under one of them."""
        self._taken: set[str] | None = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Places) -> None:
        taken = self.model.load_weights(mapped(update_info))
        self._taken = None if taken is None or self._taken is None else self._taken.union(taken)

    def finish_weight_update(self) -> None:
        """``ValueError`` names parameters that would stay as they were, under the new version's label."""
        old = not_taken(self.model, self._taken) if self.model_config.quantization is None else set[str]()
        if old := old.difference(*(names for names in self._tied if not names <= old)):
            named = ", ".join(sorted(old)[:NAMED]) + (f" and {len(old) - NAMED} more" if len(old) > NAMED else "")
            raise ValueError(f"no weights came for {named}: vLLM knows them by other names than the trainer")
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):  # tied to the embedding, for which alone weights came
                layer.quant_method.process_weights_after_loading(layer)  # on a CPU it multiplies by a packed copy

    def shutdown(self) -> None:
        """Nothing is held."""


def tied(model: torch.nn.Module) -> list[set[str]]:
    """The names of each parameter that has several."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [several for several in names.values() if len(several) > 1]


def not_taken(model: torch.nn.Module, taken: set[str] | None) -> set[str]:
    """Parameters that an update has left out when it is about to end: those of layers for which nothing came, and in
    layers that are not complete (padded ones never are) those that the model's loader did not name. ``taken`` None: it
    names none."""
    found: set[str] = set()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):  # complete, or scales of its own making
            continue
        for own, _ in layer.named_parameters(name, recurse=False):
            if info.load_numel <= 0 or (taken is not None and own not in taken):
                found.add(own)
    return found


def mapped(places: Places) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor as a map of its file. uint16 is bfloat16's bits; a private map, since torch wants one to write on."""
    try:
        with Path(places.path).open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise OSError(
            f"a process of vLLM cannot read the rollout worker's weights: {error}; both must run as one user, in one "
            "container, and see the same files and processes"
        ) from error
    for name, dtype, shape, offset in places.tensors:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(content, np.dtype(dtype), count, offset).reshape(shape)
        tensor = torch.from_numpy(array)
        yield name, tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
