# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="misc,no-untyped-call"
"""vLLM's side of a weight update, in the process that holds the model: load tensors from files into the weights.

This is a backend of vLLM's weight transfer interface. It receives places in files (``weights.Parcel``) and maps them.
The model's own loader fuses, shards and repacks: each rank of a tensor-parallel engine reads its part of the same file.
"""

import logging
import mmap
import os
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
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from staleflow.clients.weights.mmap_cache import KeptMaps

MAX_NAMED = 5
"""Maximum number of parameters that an error names."""

# vLLM warns at every update about layers that received no weights, which are normally a tied head and the rotary
# embedding. ``finish_weight_update`` itself detects any others.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class NoInit(WeightTransferInitInfo):
    """Empty, since no rendezvous is needed."""


@dataclass
class ParcelInfo(WeightTransferUpdateInfo):
    """``weights.Parcel`` as it arrives in the engine's messages."""

    path: str
    tensors: list[list[Any]]
    """Name, NumPy dtype, shape and offset of each tensor."""


class FileWeights(WeightTransferEngine[NoInit, ParcelInfo]):
    """Load weights from files on this host."""

    init_info_cls = NoInit
    update_info_cls = ParcelInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._maps = KeptMaps(mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE)
        """The server's files, which it writes again for later versions: a known map costs no page faults."""

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: no state is kept between updates."""

    def start_weight_update(self) -> None:
        self._tied = tied(self.model)
        """Sets of names that share one parameter; weights arrive under one of them."""
        self._loaded: set[str] | None = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ParcelInfo) -> None:
        loaded = self.model.load_weights(mapped(update_info, self._maps))
        self._loaded = None if loaded is None or self._loaded is None else self._loaded.union(loaded)

    def finish_weight_update(self) -> None:
        """Finish the update. ``ValueError`` names parameters that would keep old values under the new version."""
        old = not_loaded(self.model, self._loaded) if self.model_config.quantization is None else set[str]()
        if old := old.difference(*(names for names in self._tied if not names <= old)):
            named = ", ".join(sorted(old)[:MAX_NAMED]) + (
                f" and {len(old) - MAX_NAMED} more" if len(old) > MAX_NAMED else ""
            )
            raise ValueError(f"no weights came for {named}: vLLM uses other names for them than the trainer")
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):  # tied to the embedding, which alone received weights
                layer.quant_method.process_weights_after_loading(layer)  # on a CPU the head multiplies by a packed copy
            elif isinstance(layer, RoutedExperts):
                pack_experts(layer)

    def shutdown(self) -> None:
        """Drop the maps."""
        self._maps.close()


def pack_experts(layer: RoutedExperts) -> None:
    """Pack the experts for the kernel of the CPU.

    vLLM 0.32 packs them only when the kernel is built; a reload leaves rows in place of the packed blocks.
    """
    method = layer.quant_method
    if isinstance(method, UnquantizedFusedMoEMethod) and layer.w13_weight.device.type == "cpu":
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def tied(model: torch.nn.Module) -> list[set[str]]:
    """Return the names of each parameter that has more than one."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [several for several in names.values() if len(several) > 1]


def not_loaded(model: torch.nn.Module, loaded: set[str] | None) -> set[str]:
    """Return the parameters without new weights at the end of an update.

    These are all parameters of layers that received nothing, and, in incomplete layers (padded layers never complete),
    those that the model's loader did not report. ``loaded`` None: the loader reports none.
    """
    missing: set[str] = set()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):  # complete, or computes its own scales
            continue
        for own, _ in layer.named_parameters(name, recurse=False):
            if info.load_numel <= 0 or (loaded is not None and own not in loaded):
                missing.add(own)
    return missing


def mapped(places: ParcelInfo, maps: KeptMaps) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor as a private map of its file, which torch needs writable. uint16 is bfloat16's bits.

    A tensor's loader narrows it before it copies, so a rank reads no bytes of other ranks.
    """
    try:
        with Path(places.path).open("rb") as file:
            content = _content(file.fileno(), maps)
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


def _content(descriptor: int, maps: KeptMaps) -> mmap.mmap:
    """Map an open file. An unnamed file is not kept mapped: its memory would stay in use after its owner drops it."""
    status = os.fstat(descriptor)
    if status.st_nlink == 0:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    return maps.map(status, lambda: os.dup(descriptor))
