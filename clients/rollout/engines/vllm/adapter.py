# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Pass published adapters to vLLM, which loads them as LoRA adapters beside the base model's weights.

vLLM reads an adapter from a folder. Each version is therefore written to one folder of this worker, in main memory
where possible, and replaces the adapter that requests name. vLLM multiplies by A and B separately, as the trainer does.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from vllm.lora.request import LoRARequest

from staleflow.clients.models.lora import write_version

SHARED_MEMORY = Path("/dev/shm")
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM reserves room for; an adapter takes the next larger one."""


def engine_arguments(rank: int) -> dict[str, Any]:
    """Return vLLM's arguments for one adapter of this rank."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(room for room in RANKS if room >= rank)}


class AdapterFolder:
    """The folder of a model's adapter. ``model``: adapted by ``clients.models.lora``; it may be on ``meta``."""

    def __init__(self, model: Any) -> None:
        self._model = model
        parent = str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="staleflow-adapter-", dir=parent)
        self.request = self._named(load_inplace=False)
        """Names the adapter in requests; the same for all versions, whose cached keys differ by their salt."""

    def replacement(self, tensors: Mapping[str, NDArray[Any]]) -> LoRARequest:
        """Write a checked version; return the request by which vLLM loads it in place of the one before."""
        write_version(self._model, tensors, Path(self._folder.name))
        return self._named(load_inplace=True)

    def close(self) -> None:
        """Delete the folder. Idempotent."""
        self._folder.cleanup()

    def _named(self, *, load_inplace: bool) -> LoRARequest:
        return LoRARequest("adapter", 1, self._folder.name, load_inplace=load_inplace)
