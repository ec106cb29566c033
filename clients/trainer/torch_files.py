# pyright: basic, reportMissingImports=false
"""The torch files of a checkpoint: safetensors and JSON, never pickle."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from staleflow.configs.errors import ConfigError

STATE = "trainer.safetensors"
_RANDOM = "random/cpu"
_RANDOM_CUDA = "random/cuda"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def load_model(directory: Path, dtype: str, device: torch.device) -> Any:
    """The model of a directory, to be trained: gradients on, dropout off (the ratio compares like with like)."""
    quiet: Any = disable_progress_bar
    quiet()  # standard error is a log here
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model directory", str(directory), f"it must hold a causal language model ({error})"
        ) from error
    return model.to(device).eval().requires_grad_(True)


def save_model(model: Any, directory: Path, *, tokenizer_of: Path) -> None:
    """``save_pretrained``, and the small files of the initial directory (tokenizer, template) that it did not write."""
    model.save_pretrained(directory)
    for path in sorted(tokenizer_of.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHTS) and not (directory / path.name).exists():
            shutil.copyfile(path, directory / path.name)


def save_state(optimizer: Mapping[str, Tensor], directory: Path) -> None:
    """Optimizer tensors and the random state of every generator that a step may draw from."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in optimizer.items()}
    tensors[_RANDOM] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors[_RANDOM_CUDA] = torch.cuda.get_rng_state()
    save_file(tensors, directory / STATE)


def load_state(directory: Path, device: torch.device) -> dict[str, Tensor]:
    """The optimizer's tensors; the random state is set on the way."""
    tensors = load_file(directory / STATE)
    torch.set_rng_state(tensors.pop(_RANDOM))
    cuda = tensors.pop(_RANDOM_CUDA, None)
    if cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(cuda)
    return tensors
