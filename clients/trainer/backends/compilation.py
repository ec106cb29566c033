# pyright: basic, reportMissingImports=false
"""Decoder layers compiled by torch: ``trainer.compile``.

Each layer's ``forward`` is compiled by itself, for any batch size and length: hooks of FSDP and gradient checkpointing
stay outside, and the layers share the compiled code. Attention over packed rows and shared prompts depends on the
lengths of each batch, so it runs between two compiled parts.
"""

import logging
import os
import shutil
import sysconfig
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from staleflow.clients.out_of_memory import first_line, out_of_memory
from staleflow.clients.trainer.backends.output_layer import Forward
from staleflow.clients.trainer.backends.sharded_files import layers
from staleflow.configs.errors import ConfigError

log = logging.getLogger(__name__)

_VARIANTS = 64
"""Maximum number of compilations of a layer: with and without gradients, masks, and so on. Then it runs uncompiled."""
_ROUNDING, _COARSE_ROUNDING = 1e-3, 0.05
"""Maximum deviation of compiled logits and gradients, as a share of their norm, in float32 and in bfloat16."""


class CompiledLayers:
    """The compiled layers of each model that the trainer loads; without ``wanted`` every method has no effect."""

    def __init__(self, wanted: bool, device: torch.device) -> None:
        self._wanted = wanted
        self._layers: list[Any] = []
        if wanted:
            check_compiler(device)
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)

    def apply(self, model: Any) -> None:
        """Compile the layers of a loaded model at their first pass."""
        compiled = layers(model) if self._wanted else []
        for layer in compiled:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        # FSDP renames the classes by which ``layers`` knows them; a strong reference would keep the model alive.
        self._layers = [weakref.ref(layer) for layer in compiled]

    def paused(self) -> AbstractContextManager[Any]:
        """Return a context in which the layers run uncompiled."""
        return torch.compiler.set_stance("force_eager") if self._wanted else nullcontext()

    def check(
        self,
        model: Any,
        forward: Forward,
        backward: Callable[[Tensor], None],
        device: torch.device,
        any_rank: Callable[[bool], bool],
    ) -> None:
        """Compare a small pass with an uncompiled one; with a deviation or an error, compile nothing from now on.

        Call it on every rank, after which the gradient must be cleared.
        """
        if not self._wanted:
            return
        reason = "" if self._layers else "its layers are not known"
        try:
            reason = reason or self._deviation(model, forward, backward, device)
        except Exception as error:
            if out_of_memory(error):
                raise
            reason = f"compilation raises {type(error).__name__}: {first_line(error)}"
        if any_rank(bool(reason)):
            log.warning("trainer.compile has no effect on this model: %s", reason or "see the log of another rank")
            self._wanted = False
            for layer in self._layers:
                del layer().forward

    def _deviation(self, model: Any, forward: Forward, backward: Callable[[Tensor], None], device: torch.device) -> str:
        embeddings = model.get_input_embeddings()
        ids = (torch.arange(32, device=device) % embeddings.num_embeddings).view(2, -1)
        gradients: list[Tensor] = []

        def look(_: object, __: object, output: Any) -> None:
            output.requires_grad_(True)  # not set if the embeddings are frozen, below an adapter
            output.register_hook(lambda gradient: gradients.append(gradient.detach().float()))

        def logits() -> Tensor:
            computed = forward(input_ids=ids).float()
            backward(computed.square().mean())
            return computed.detach()

        hook = embeddings.register_forward_hook(look)
        try:
            with self.paused():
                expected = logits()
            computed = logits()
        finally:
            hook.remove()
        tolerance = _ROUNDING if embeddings.weight.dtype == torch.float32 else _COARSE_ROUNDING
        for what, one, other in (("logits", computed, expected), ("gradient", gradients[1], gradients[0])):
            deviation = float((one - other).norm() / other.norm().clamp(min=1e-12))
            if not deviation <= tolerance:
                return f"its {what} would deviate by {deviation:.2g} of their norm"
        return ""


def check_compiler(device: torch.device) -> None:
    """Raise ``ConfigError`` if this machine lacks what torch needs to compile for the device."""
    kind, variable, usual = ("C++", "CXX", "g++") if device.type == "cpu" else ("C", "CC", "gcc")
    compiler = os.environ.get(variable, usual)
    if shutil.which(compiler) is None:
        allowed = f"it needs a {kind} compiler, and {compiler} is not on the PATH: install one, or set {variable} to it"
        raise ConfigError("trainer.compile", True, allowed)
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        allowed = f"it needs Python's headers, and {header} does not exist: install python3-dev or the like"
        raise ConfigError("trainer.compile", True, allowed)
