# pyright: basic, reportMissingImports=false
"""The critic's checkpoint: one safetensors file, replaced atomically, and a lock that excludes a second critic.

A critic killed at any instant leaves the previous checkpoint or the new one, never a partial one.
"""

import fcntl
import logging
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from staleflow.configs.durable_files import make_folder, replace_durably
from staleflow.configs.errors import ConfigError

log = logging.getLogger(__name__)

FILE = "critic.safetensors"
STEPS = "steps"
_MODEL, _ADAM = "model/", "adam/"


class CriticFiles:
    """The critic's files in ``folder``, locked by this process. Raise ``ConfigError`` if another process has the
    lock."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self._path = folder / FILE
        self._lock = (folder / ".lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            allowed = "another critic of this run uses the folder; a run has only one critic"
            raise ConfigError("critic", str(folder), allowed) from None

    def save(self, model: nn.Module, adam: torch.optim.Optimizer, steps: int) -> None:
        """Save a checkpoint; it is durable on return."""
        tensors = {_MODEL + name: value.detach().cpu().contiguous() for name, value in model.named_parameters()}
        for name, parameter in model.named_parameters():
            for key, value in adam.state.get(parameter, {}).items():
                tensors[f"{_ADAM}{key}/{name}"] = value.detach().cpu().contiguous()
        part = self._path.with_suffix(".part")
        save_file(tensors, part, metadata={STEPS: str(steps)})
        replace_durably(part, self._path)

    def load(self, model: nn.Module, adam: torch.optim.Optimizer) -> int:
        """Restore model and optimizer from the last checkpoint; return its number of steps, or 0 without one.

        A file that is damaged or belongs to another model is logged, and the critic starts from its initial state.
        """
        if not self._path.exists():
            return 0
        try:
            with safe_open(self._path, framework="pt") as file:
                steps = int((file.metadata() or {})[STEPS])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            _restore(model, adam, tensors)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            log.error("checkpoint %s ignored, the critic starts from its initial state: %s", self._path, error)
            return 0
        log.info("critic resumed after step %d", steps)
        return steps

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


def _restore(model: nn.Module, adam: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    saved = {name.removeprefix(_MODEL): value for name, value in tensors.items() if name.startswith(_MODEL)}
    if {name: value.shape for name, value in saved.items()} != {name: p.shape for name, p in parameters.items()}:
        raise ValueError("it belongs to another model")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    for full, value in tensors.items():
        if not full.startswith(_ADAM):
            continue
        key, _, name = full.removeprefix(_ADAM).partition("/")
        parameter = parameters[name]
        # Adam keeps its count of steps in main memory, its moments beside the weights
        adam.state[parameter][key] = value if key == "step" else value.to(parameter.device)
