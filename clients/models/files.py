# pyright: basic, reportMissingImports=false
"""Torch files of a checkpoint: safetensors and JSON, never pickle."""

import json
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from staleflow.clients.models.fused_weights import as_stored
from staleflow.clients.models.optimizer_files import FILE_BYTES, TensorFile
from staleflow.configs.errors import ConfigError
from staleflow.configs.ranks import Place

_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"
_CPU, _CUDA = "cpu", "cuda"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def load_model(directory: Path, dtype: str, device: torch.device) -> Any:
    """Load a model for training: gradients on, dropout off (so that the policy ratio compares equal computations).

    Raise ``ConfigError`` if the files are not a causal language model, or their tensors do not match its configuration.
    """
    quiet: Any = disable_progress_bar
    quiet()  # standard error is a log file here
    try:
        model: Any
        info: Any
        load: Any = AutoModelForCausalLM.from_pretrained
        model, info = load(
            directory,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported below with their names
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            "model directory", str(directory), f"it must hold a causal language model ({error})"
        ) from error
    for what in ("mismatched", "missing", "unexpected"):
        if names := sorted(str(name) for name in info[f"{what}_keys"]):
            raise ConfigError(
                "model directory", str(directory), f"its weights must fit its config.json: {what} {', '.join(names)}"
            )
    return model.to(device).eval().requires_grad_(True)


def save_model(
    model: Any, tensors: Iterable[tuple[str, Tensor]], directory: Path, *, dtype: str, tokenizer_of: Path
) -> None:
    """Save like ``save_pretrained``, from tensors that arrive one by one, with at most one file of them in memory.

    Names are those of the files that the model was loaded from: one tensor per expert of a mixture of experts. Small
    files (tokenizer, template) are those of the initial directory. ``generation_config.json`` is among them:
    ``transformers`` loads some files that it refuses to save.
    """
    files: list[list[str]] = []
    part: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        if part:
            save_file(part, directory / f"part-{len(files)}", metadata={"format": "pt"})
            files.append(list(part))
            part.clear()

    for own, tensor in tensors:
        for name, value in as_stored(model, own, tensor.detach()):
            part[name] = value.to("cpu", copy=True).contiguous()
            total += part[name].nbytes
        if sum(value.nbytes for value in part.values()) >= FILE_BYTES:
            flush()
    flush()
    places: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors" if len(files) > 1 else _ONE
        (directory / f"part-{number}").rename(directory / file)
        places |= dict.fromkeys(names, file)
    if len(files) > 1:
        (directory / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = getattr(torch, dtype)
    config.architectures = model.config.architectures
    config.save_pretrained(directory)
    copy_small(directory, tokenizer_of)


def copy_small(directory: Path, tokenizer_of: Path, *, without: Collection[str] = ()) -> None:
    """Copy the small files of a model directory that ``directory`` does not have."""
    for path in sorted(tokenizer_of.iterdir()):
        wanted = path.is_file() and not path.name.endswith(WEIGHTS) and path.name not in without
        if wanted and not (directory / path.name).exists():
            shutil.copyfile(path, directory / path.name)


def shard_file(backend: str, where: Place, *, inside: Path | None = None) -> Path:
    """Return the file of a rank's shards. ``inside``: in this checkpoint; ``ConfigError`` if another setup wrote it."""
    name = Path(f"{backend}-{where.rank}-of-{where.world}.safetensors")
    if inside is None or (inside / name).is_file():
        return name if inside is None else inside / name
    raise _written_by_others(inside)


def check_any_ranks(directory: Path) -> None:
    """Raise ``ConfigError`` if a backend wrote the checkpoint whose files only the same ranks can read."""
    if next(directory.glob("deepspeed-*.safetensors"), None) is not None:
        raise _written_by_others(directory)


def _written_by_others(directory: Path) -> ConfigError:
    """Return an error that names the writer of the checkpoint."""
    writer, remedy = "torch, ddp or fsdp", "resume with one of them"
    for file in directory.glob("deepspeed-*-0-of-*.safetensors"):
        backend, _, ranks = file.stem.partition("-0-of-")
        writer = f"{backend} on {ranks} ranks, whose files only the same ranks can read"
        remedy = "resume with the same trainer.backend, trainer.zero_stage and trainer.nproc"
    return ConfigError("checkpoint", str(directory), f"it was written by {writer}; {remedy}")


def random_file(rank: int) -> TensorFile:
    """Return the random state of every generator that a step of this rank may use."""
    tensors = {_CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors[_CUDA] = torch.cuda.get_rng_state()
    return TensorFile(_random_name(rank), tensors)


def _random_name(rank: int) -> str:
    return f"random-{rank}.safetensors"


def load_random(directory: Path, rank: int, device: torch.device) -> None:
    """Restore the random state; a rank without one in the checkpoint keeps its own."""
    path = directory / _random_name(rank)
    if not path.is_file():
        return
    tensors = load_file(path)
    torch.set_rng_state(tensors[_CPU])
    if _CUDA in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors[_CUDA])
