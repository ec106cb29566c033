# pyright: basic, reportMissingImports=false
"""A model without its weights, and its weights tensor by tensor: for backends of which no rank holds them all.

What is read is copied: nothing keeps a file open or mapped.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from staleflow.clients.trainer.backends.files import load_model

log = logging.getLogger(__name__)

_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"


class WeightFiles:
    """The tensors of a model directory's safetensors, by name, each read when it is asked for.

    ``OSError``, ``ValueError``, ``KeyError`` or ``SafetensorError`` when there are none that can be read.
    """

    def __init__(self, directory: Path) -> None:
        index = directory / _INDEX
        listed = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else {_ONE}
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(directory / name for name in listed):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    self._files[name] = path
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def stored(self, names: list[str]) -> str:
        """The one of a tensor's names that it is in the files by."""
        return next(name for name in names if name in self._files)

    def read(self, name: str, into: Tensor, rows: slice | None = None) -> Tensor:
        """``into``, of any dtype and on any device, filled with a tensor or with some of its first extent."""
        with _opened(self._files[name]) as file:
            found: Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
            return into.copy_(found)


def open_model(directory: Path, dtype: str, device: torch.device) -> tuple[Any, WeightFiles | None]:
    """The model of a directory, to be trained, as ``load_model`` gives it; but its parameters are on the meta device
    and come from the files. Tied ones are tied, buffers have their values, on ``device``.

    Complete, and no files, where these do not hold every tensor by the model's own name for it. ``ConfigError`` as of
    ``load_model``.
    """
    try:
        files, model = WeightFiles(directory), empty_model(directory, dtype, device)
    except (OSError, ValueError, KeyError, SafetensorError):
        return load_model(directory, dtype, device), None  # it finds the words
    if fit(model, files):
        return model, files
    log.info("%s: every rank reads the whole model, its files name or shape tensors in another way", directory)
    return load_model(directory, dtype, device), None


def empty_model(directory: Path, dtype: str, device: torch.device) -> Any:
    """The model as its configuration says, buffers computed, parameters on the meta device."""
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
    """Whether each tensor of the model is in the files once, by one of its names, and nothing else is."""
    left = dict(files.shapes)
    for tensor, names in distinct(model):
        stored = [name for name in names if name in left]
        if len(stored) != 1 or left.pop(stored[0]) != tuple(tensor.shape):
            return False
    return not left


def distinct(model: Any) -> list[tuple[Tensor, list[str]]]:
    """What ``state_dict`` holds: each tensor with all its names, tied ones together."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def layers(model: Any) -> list[Any]:
    """What a backend gathers, and shards, by itself: the decoder layers."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built meanwhile have parameters without memory, and real buffers, whatever these are computed from."""
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


def _opened(path: Path) -> Any:
    return safe_open(path, framework="pt")
