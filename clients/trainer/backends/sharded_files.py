# pyright: basic, reportMissingImports=false
"""A model without weights, and its weights tensor by tensor, for backends in which no rank holds all of them.

Reads copy the data, so no file stays open or mapped.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from staleflow.clients.models.files import load_model
from staleflow.clients.models.fused_weights import Experts, stored_names, stored_shape

log = logging.getLogger(__name__)

_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"


class WeightFiles:
    """The tensors of a model directory's safetensors by name, each read on demand.

    Raise ``OSError``, ``ValueError``, ``KeyError`` or ``SafetensorError`` if they are missing or unreadable.
    """

    def __init__(self, directory: Path) -> None:
        index = directory / _INDEX
        listed = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else {_ONE}
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(directory / name for name in listed):
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    self._files[name] = path
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())
        self._names: dict[str, str | Experts] = {}

    def map(self, names: dict[str, str | Experts] | None) -> bool:
        """Use the model's names, which ``stored_names`` returned, in place of the files'; return whether it has any."""
        self._names = names or {}
        self.shapes = {own: stored_shape(stored, self.shapes) for own, stored in self._names.items()}
        return names is not None

    def stored(self, names: list[str]) -> str:
        """Return which of a tensor's names the files use."""
        return next(name for name in names if name in self.shapes)

    def read(self, name: str, into: Tensor, rows: slice | None = None) -> Tensor:
        """Fill ``into``, of any dtype and device, with a tensor or with ``rows`` of its first dimension; return it."""
        stored = self._names.get(name, name)
        if not isinstance(stored, str):
            return self._read_experts(stored if rows is None else stored[rows], into)
        with _open(self._files[stored]) as file:
            tensor: Tensor = file.get_tensor(stored) if rows is None else file.get_slice(stored)[rows]
            return into.copy_(tensor)

    def _read_experts(self, experts: Experts, into: Tensor) -> Tensor:
        """Fill ``into`` with the experts, one stored tensor at a time."""
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for expert, names in zip(into, experts, strict=True):
                start = 0
                for name in names:
                    path = self._files[name]
                    if path not in opened:
                        opened[path] = stack.enter_context(_open(path))
                    part: Tensor = opened[path].get_tensor(name)
                    expert[start : start + len(part)].copy_(part)
                    start += len(part)
        return into


def open_model(directory: Path, dtype: str, device: torch.device) -> tuple[Any, WeightFiles | None]:
    """Open a model for training like ``load_model``, but with its parameters on the meta device and in the files.

    Tied parameters are tied, and buffers have their values, on ``device``. The files may have one tensor per expert of
    a mixture of experts. If they do not hold every tensor in a way that ``stored_names`` can map, return the complete
    model and no files. Raise ``ConfigError`` as ``load_model`` does.
    """
    try:
        files, model = WeightFiles(directory), empty_model(directory, dtype, device)
    except (OSError, ValueError, KeyError, SafetensorError):
        return load_model(directory, dtype, device), None  # it raises an error with the reason
    if fit(model, files) or (files.map(stored_names(model, files.shapes)) and fit(model, files)):
        return model, files
    log.info("%s: its files name or shape tensors differently, so every rank reads the whole model", directory)
    return load_model(directory, dtype, device), None


def empty_model(directory: Path, dtype: str, device: torch.device) -> Any:
    """Build the model from its configuration, with computed buffers and parameters on the meta device."""
    build: Any = AutoModelForCausalLM.from_config
    with _parameters_on_meta():
        model = build(AutoConfig.from_pretrained(directory, local_files_only=True), dtype=getattr(torch, dtype))
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model.eval().requires_grad_(True)


def fit(model: Any, files: WeightFiles) -> bool:
    """Return whether the files hold each tensor of the model once, under one of its names, and nothing else."""
    left = dict(files.shapes)
    for tensor, names in distinct(model):
        stored = [name for name in names if name in left]
        if len(stored) != 1 or left.pop(stored[0]) != tuple(tensor.shape):
            return False
    return not left


def distinct(model: Any) -> list[tuple[Tensor, list[str]]]:
    """Return each tensor of ``state_dict`` with all its names, tied ones together."""
    tensors: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(tensors.values())


def layers(model: Any) -> list[Any]:
    """Return the decoder layers, the units that a backend shards and gathers."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Build modules with parameters on meta but real buffers, regardless of the source of the buffers' values."""
    every: Any = nn.Module
    register = every.register_parameter

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    every.register_parameter = empty
    try:
        yield
    finally:
        every.register_parameter = register


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt")
