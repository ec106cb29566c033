# pyright: basic, reportMissingImports=false
"""AdamW of ``trainer.optimizer``: torch's, or torchao's with moments of 8 bits.

An 8-bit moment is a tensor subclass of torchao: codes, a float32 scale for each block of 256 values, and a table of the
256 code values (Dettmers et al. 2022, arXiv 2110.02861). It has no storage of its own, so that copies and files need
its plain parts.
"""

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from staleflow.configs.loading.presence import TORCHAO, check_package
from staleflow.configs.trainer import Trainer

BLOCK = 256
"""Number of values with one scale."""
_PARTS = ("codes", "scale", "qmap")


def make_adamw(groups: list[dict[str, Any]], config: Trainer) -> torch.optim.Optimizer:
    """Return the optimizer of ``trainer.optimizer`` over parameter groups."""
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.adam_eps}
    if config.optimizer == "adamw":
        # fused: one pass over the memory of weights, gradients and moments, without temporary copies
        return torch.optim.AdamW(groups, fused=True, **settings)
    check_package("trainer.optimizer", config.optimizer, "torchao", TORCHAO)
    logging.getLogger("torchao").setLevel(logging.CRITICAL)  # it logs each kernel that this machine cannot load
    adamw: Any = importlib.import_module("torchao.optim").AdamW8bit
    optimizer: torch.optim.Optimizer = adamw(groups, **settings)
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step. torchao keeps it in a tensor, which its compiled step reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def stepping(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of ``step``. torchao compiles its step, for which a CPU would need a C++ compiler."""
    return torch.compiler.set_stance("force_eager") if device.type == "cpu" else nullcontext()


def plain_parts(key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield one entry of the optimizer's state as plain tensors: ``key`` itself, or ``key.codes`` and so on."""
    if not hasattr(value, "codes"):
        yield key, value
        return
    for part in _PARTS:
        yield f"{key}.{part}", getattr(value, part)


def empty_part(key: str, parameter: Tensor) -> Tensor:
    """Return a tensor to read a plain part of a parameter's state into."""
    device = parameter.device
    if key == "step":  # optimizers keep their step count beside the moments, on the weights' device
        return torch.zeros((), device=device)
    match key.partition(".")[2]:
        case "codes":
            return torch.empty_like(parameter, dtype=torch.uint8)
        case "scale":
            return torch.empty(parameter.numel() // BLOCK, device=device)
        case "qmap":
            return torch.empty(256, device=device)
        case _:
            return torch.empty_like(parameter)


def joined(parameter: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer's state of a parameter, which uses the plain tensors of ``plain_parts``."""
    state = {key: value for key, value in parts.items() if "." not in key}
    for key in dict.fromkeys(key.partition(".")[0] for key in parts if "." in key):
        moment: Any = importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit
        codes, scale, qmap = (parts[f"{key}.{part}"] for part in _PARTS)
        state[key] = moment(codes, scale, qmap, bool(qmap.min() < 0), dtype=parameter.dtype)
    return state
