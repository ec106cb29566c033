# pyright: basic, reportMissingImports=false
"""Snapshots of the critic: one safetensors file each, written atomically and verified when read; and the critic's lock.

``<version>.safetensors`` holds weights, optimizer and the groups that wait for their step. No group that it has learned
from, or that waits, has tokens of a later version. A critic that is killed at any instant leaves its snapshots intact.
"""

import fcntl
import hashlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from staleflow.clients.stage.history import START, Position, RunHistory
from staleflow.configs.durable_files import make_folder, replace_durably
from staleflow.configs.errors import ConfigError
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.trajectory import GroupPayload

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_PART, _DAMAGED = ".part", ".damaged"
_HEAD, _SHA = "critic", "sha256"
_MODEL, _ADAM, _GROUP = "model", "adam", "group"


_DAMAGE = (SafetensorError, OSError, KeyError, ValueError, ProtocolError)
"""Exceptions of a snapshot that cannot be used."""


class CriticState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scalars of a critic: its place in the data of the run."""

    steps: int = 0
    newest: Position = START
    """The newest version that wrote tokens of the groups that it has learned from, or that wait."""


class CriticFiles:
    """The critic's files in ``folder``, locked by this process. Raise ``ConfigError`` if another process has the
    lock."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self._folder = folder
        self._lock = (folder / ".lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            allowed = "another critic of this run uses the folder; a run has only one critic"
            raise ConfigError("critic", str(folder), allowed) from None
        for part in folder.glob(f"*{_PART}"):
            part.unlink()

    def save(
        self, state: CriticState, model: nn.Module, adam: torch.optim.Optimizer, waiting: Collection[GroupPayload]
    ) -> None:
        """Save a snapshot; it is durable on return. It replaces one of the same version."""
        tensors: dict[str, Tensor] = {f"{_MODEL}/{name}": value for name, value in model.named_parameters()}
        for name, parameter in model.named_parameters():
            tensors |= {f"{_ADAM}/{key}/{name}": value for key, value in adam.state.get(parameter, {}).items()}
        tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        for number, payload in enumerate(waiting):
            arrays = replace(payload, columns={}).to_arrays()
            tensors |= {f"{_GROUP}/{number}/{name}": torch.from_numpy(np.array(a)) for name, a in arrays.items()}
        head = msgspec.json.encode(state).decode()
        path = self._path(state.newest[1])
        part = path.with_suffix(_PART)
        save_file(tensors, part, metadata={_HEAD: head, _SHA: _digest(head, tensors)})
        replace_durably(part, path)

    def load(
        self, history: RunHistory, model: nn.Module, adam: torch.optim.Optimizer
    ) -> tuple[CriticState, list[GroupPayload]] | None:
        """Restore the newest snapshot that no rollback has abandoned; return its state and its waiting groups.

        A damaged one is logged and renamed, and the one before is used. None: no snapshot is left, and model and
        optimizer are unchanged.
        """
        for version in reversed(self._survivors(history)):
            path = self._path(version)
            try:
                state, tensors = _read(path)
                return state, _restore(model, adam, tensors)
            except _DAMAGE as error:
                _set_aside(path, error)
        return None

    def tidy(self, history: RunHistory, every: int) -> None:
        """Delete the snapshots that rollbacks have abandoned, and those that no rollback needs.

        A trainer can go back to its registered checkpoints, and soon to later multiples of ``every``.
        """
        kept = needed(self._survivors(history), history.checkpoints, every)
        for version in self.versions():
            if version not in kept:
                self._path(version).unlink()

    def versions(self) -> list[int]:
        """Return the versions that have a snapshot, ascending."""
        return sorted(int(path.stem) for path in self._folder.glob(f"*{SUFFIX}") if path.stem.isdecimal())

    def _survivors(self, history: RunHistory) -> list[int]:
        """Return the versions of the snapshots that no rollback has abandoned, ascending."""
        survivors: list[int] = []
        for version in self.versions():
            try:
                if history.survives(_state(self._path(version)).newest):
                    survivors.append(version)
            except _DAMAGE as error:
                _set_aside(self._path(version), error)
        return survivors

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def _path(self, version: int) -> Path:
        return self._folder / f"{version}{SUFFIX}"


def needed(versions: Collection[int], checkpoints: Collection[int], every: int) -> set[int]:
    """Return the newest of these versions, and for each checkpoint the newest one that is not above it."""
    newest = max(versions, default=0)
    due = range(max(checkpoints) // every * every + every, newest, every)
    return {max(below) for limit in (*checkpoints, *due, newest) if (below := [v for v in versions if v <= limit])}


def _set_aside(path: Path, error: Exception) -> None:
    """Rename a damaged snapshot, so that an operator can inspect it."""
    aside = path.with_suffix(_DAMAGED)
    path.rename(aside)
    log.error("critic snapshot %s is damaged (%s): set aside as %s", path, error, aside)


def _state(path: Path) -> CriticState:
    """Return the state of a snapshot without verifying its tensors."""
    with safe_open(path, framework="pt") as file:
        return msgspec.json.decode((file.metadata() or {})[_HEAD], type=CriticState)


def _read(path: Path) -> tuple[CriticState, dict[str, Tensor]]:
    """Read and verify a snapshot."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    if metadata[_SHA] != _digest(metadata[_HEAD], tensors):
        raise ValueError("its content does not match its digest")
    return msgspec.json.decode(metadata[_HEAD], type=CriticState), tensors


def _digest(head: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(head.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _restore(model: nn.Module, adam: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> list[GroupPayload]:
    """Restore model and optimizer; return the waiting groups. ``ValueError``, with nothing changed, if they do not fit
    the model."""
    parameters = dict(model.named_parameters())
    saved: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    groups: dict[int, dict[str, np.ndarray]] = {}
    for full, value in tensors.items():
        kind, _, rest = full.partition("/")
        key, _, name = rest.partition("/")
        if kind == _MODEL:
            saved[rest] = value
        elif kind == _ADAM:
            moments[name][key] = value
        else:
            groups.setdefault(int(key), {})[name] = value.numpy()
    if {name: value.shape for name, value in saved.items()} != {name: p.shape for name, p in parameters.items()}:
        raise ValueError("it belongs to another model")
    waiting = [GroupPayload.from_arrays(groups[number]) for number in sorted(groups)]
    adam.state.clear()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
            for key, value in moments[name].items():
                # Adam keeps its count of steps in main memory, its moments beside the weights
                adam.state[parameter][key] = value if key == "step" else value.to(parameter.device)
    return waiting
