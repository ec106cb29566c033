# pyright: basic, reportMissingImports=false
"""LoRA adapters (Hu et al. 2021) of ``peft``, inside the model that they adapt.

A version of a run with an adapter holds the tensors of ``peft``'s own file, by the names in that file, and the digest
of the base model: over another base, the same adapter is another policy. Trainer and engines compute the same
``W x + (alpha / rank) B (A x)``, and therefore equal log-probabilities. Merged weights would not: in bfloat16 most
changes of an adapter are smaller than the rounding of W.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from staleflow.clients.models.files import WEIGHTS, copy_small
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.presence import ADAPTER, check_adapter_dir
from staleflow.configs.lora import Lora
from staleflow.protocols.wire.manifest import Digest

FILE = "adapter_model.safetensors"
BASE = "base_digest"
"""Name of the digest in versions, and in the metadata of ``FILE``."""
_NAME = "default"
_PREFIX = "base_model.model."
"""Begins the names in ``FILE``: ``peft`` saves from two modules around the model."""
_CHUNK = 1 << 24


def adapt(model: Any, lora: Lora, directory: Path, *, seed: int = 0) -> None:
    """Add an adapter without effect (B is 0) to a model with the weights of ``directory``, and freeze those weights.

    A depends on ``seed`` alone, so that every rank and every restart has the same version 0. ``lora.path`` has no
    effect here. Raise ``ConfigError`` for layers that the model does not have. The model may be on ``meta``.
    """
    inject(model, lora, seed=seed)
    model.base_digest = torch.from_numpy(base_digest(directory))
    model.eval()


def inject(model: Any, lora: Lora, *, seed: int = 0) -> None:
    """Add the layers of an adapter to a model, as ``adapt`` does, without the digest of its weights."""
    from peft import LoraConfig, inject_adapter_in_model

    make: Any = LoraConfig
    config = make(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # readers may expect an integer
        target_modules=list(lora.target_modules) or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    _check_linear(model, lora.target_modules)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)


def _check_linear(model: Any, targets: Sequence[str]) -> None:
    """Raise ``ConfigError`` unless each target is the end of a linear layer's name, and of no other module's."""
    for target in targets:
        kinds = {type(module) for name, module in model.named_modules() if f".{name}".endswith(f".{target}")}
        if not kinds or not all(issubclass(kind, (nn.Linear, Conv1D)) for kind in kinds):
            ends = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
            allowed = f"{target} is no linear layer of the model; it has {', '.join(sorted(ends))}"
            raise ConfigError("model.lora.target_modules", list(targets), allowed)


def is_adapted(model: Any) -> bool:
    """Return whether ``adapt`` has added an adapter to the model."""
    return hasattr(model, "base_digest")


def published(model: Any) -> dict[str, Tensor]:
    """Return the tensors that a version holds, by name: those of ``state_dict``, or the adapter and its base's digest.

    The values are the model's own tensors, so that copies into them change the model.
    """
    if not is_adapted(model):
        whole: dict[str, Tensor] = model.state_dict(keep_vars=True)
        return whole
    return adapter_tensors(model) | {BASE: model.base_digest}


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Return the adapter's parameters by their names in ``FILE``."""
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(model, model.state_dict(keep_vars=True), save_embedding_layers=False)
    return {_PREFIX + name: tensor for name, tensor in own.items()}


def base_digest(directory: Path) -> np.ndarray[Any, Any]:
    """Return the digest of a model directory's configuration and weights: uint8 [16], equal for equal files."""
    digest = Digest()
    for path in sorted(directory.iterdir()):
        model = path.name.startswith(("model", "pytorch_model")) and path.name.endswith(WEIGHTS)
        if not model and path.name != "config.json":
            continue
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return np.frombuffer(bytes.fromhex(digest.hex()), np.uint8).copy()


def save_adapter(model: Any, directory: Path, *, base: str, tokenizer_of: Path) -> None:
    """Save a folder for ``PeftModel.from_pretrained``, with the small files of the base except its configuration.

    ``base``: path or hub id of the base model, for readers. Without ``config.json``, no program takes the folder for a
    whole model.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter_tensors(model).items()}
    _save(model, tensors, directory, base)
    copy_small(directory, tokenizer_of, without=("config.json",))


def write_version(model: Any, tensors: Mapping[str, np.ndarray[Any, Any]], directory: Path) -> None:
    """Write a version of an adapted model as a folder of ``peft``; files of an earlier one are replaced."""
    values = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items() if name != BASE}
    bits = {
        name: value.view(torch.bfloat16) if value.dtype == torch.uint16 else value for name, value in values.items()
    }
    _save(model, bits, directory, "")


def _save(model: Any, tensors: Mapping[str, Tensor], directory: Path, base: str) -> None:
    digest = model.base_digest.numpy().tobytes().hex()
    save_file(dict(tensors), directory / FILE, metadata={"format": "pt", BASE: digest})
    config = copy.copy(model.peft_config[_NAME])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(directory)


def load_adapter(model: Any, directory: Path, key: str = "checkpoint") -> None:
    """Copy the adapter of a folder into an adapted model. ``ConfigError`` if it has other layers, rank, alpha or base.

    Folders that ``save_adapter`` did not write may lack the digest of their base, which is then not checked.
    """
    tensors, digest = read_adapter(directory, key)
    own = adapter_tensors(model)
    theirs, ours = _config(directory, key), model.peft_config[_NAME]
    for name in ("r", "lora_alpha"):
        if getattr(theirs, name) != getattr(ours, name):
            allowed = f"its {name} is {getattr(theirs, name)}; this run has {getattr(ours, name)}"
            raise ConfigError(key, str(directory), allowed)
    if {name: tensor.shape for name, tensor in tensors.items()} != {name: value.shape for name, value in own.items()}:
        different = sorted(tensors.keys() ^ own.keys())
        what = f"only one of both has {different[0]}" if different else "their shapes differ"
        allowed = f"its layers must be those of model.lora.target_modules in this model: {what}"
        raise ConfigError(key, str(directory), allowed)
    if digest and digest != (expected := model.base_digest.numpy().tobytes().hex()):
        allowed = f"it was trained over a base model with digest {digest}; the one here has {expected}"
        raise ConfigError(key, str(directory), allowed)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def read_adapter(directory: Path, key: str = "checkpoint") -> tuple[dict[str, Tensor], str]:
    """Return the tensors of an adapter by name, and the hex digest of its base, empty if the file has none."""
    check_adapter_dir(directory, key)
    try:
        with safe_open(directory / FILE, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, (file.metadata() or {}).get(BASE, "")
    except (OSError, SafetensorError) as error:
        raise ConfigError(key, str(directory), f"its {FILE} cannot be read: {error}") from error


def saved_version(directory: Path, base: Path, dtype: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return an adapter as a version for an engine over ``base``, whose digest it gets if its file has none."""
    tensors, digest = read_adapter(directory)
    raw: dict[str, np.ndarray[Any, Any]] = {}
    for name, tensor in tensors.items():
        value = tensor.to(getattr(torch, dtype)).contiguous()
        raw[name] = value.view(torch.uint16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
    raw[BASE] = np.frombuffer(bytes.fromhex(digest), np.uint8) if digest else base_digest(base)
    return raw


def lora_of(directory: Path, key: str) -> tuple[Lora, str]:
    """Return the settings of an adapter's folder, and its base model's path or hub id."""
    config = _config(directory, key)
    lora = Lora(
        rank=config.r,
        alpha=float(config.lora_alpha),
        target_modules=sorted(config.target_modules),
        path=str(directory.resolve()),
    )
    return lora, config.base_model_name_or_path or ""


def _config(directory: Path, key: str) -> Any:
    """Return the configuration of an adapter, which must be a LoRA of the plain kind that ``adapt`` makes."""
    from peft import LoraConfig, PeftConfig

    check_adapter_dir(directory, key)
    try:
        config = PeftConfig.from_pretrained(str(directory))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(key, str(directory), f"its {ADAPTER} cannot be read: {error}") from error
    plain = LoraConfig()
    kinds = (
        *("use_dora", "use_rslora", "bias", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save"),
        *("target_parameters", "layer_replication", "trainable_token_indices"),
    )
    if not isinstance(config, LoraConfig):
        raise ConfigError(key, str(directory), f"its kind is {config.peft_type}; it must be LORA")
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights != "gaussian":
        how = f"its init_lora_weights is {config.init_lora_weights}, which may change the base model"
        raise ConfigError(key, str(directory), f"{how}; convert it to plain LoRA with peft")
    for name in kinds:
        if getattr(config, name) not in (getattr(plain, name), None):
            raise ConfigError(key, str(directory), f"its {name} is {getattr(config, name)}; only plain LoRA is trained")
    return config
