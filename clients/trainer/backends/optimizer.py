# pyright: basic, reportMissingImports=false
"""AdamW over float32 master weights, whatever dtype the model computes in.

A learning rate of 1e-6 changes a weight by less than bfloat16 resolves; accumulated in float32, these changes count.
For a float32 model the master weights *are* the model's, and nothing is copied. With ``trainer.offload = "optimizer"``
they are in main memory, where the CPU takes the step.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from staleflow.clients.trainer.backends.adamw import empty_part, joined, make_adamw, plain_parts, set_rate, stepping
from staleflow.clients.trainer.backends.lr_schedule import learning_rate
from staleflow.clients.trainer.backends.snapshot import Snapshot
from staleflow.configs.trainer import Trainer


class MasterAdamW:
    """The optimizer of one model. ``collect`` sums the gradients of passes in float32."""

    def __init__(self, model: nn.Module, config: Trainer) -> None:
        self._config = config
        home = torch.device("cpu") if config.offload == "optimizer" else None
        self._model = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._master = {
            name: p if p.dtype == torch.float32 and (home or p.device) == p.device else _master(p, home)
            for name, p in self._model.items()
        }
        self._of = {id(p): self._master[name] for name, p in self._model.items()}
        self._adam = make_adamw(groups(self._master.values(), config), config)

    def collect(self) -> None:
        """Add the model's gradients to the masters' and clear them; no effect for a float32 model."""
        for name, parameter in self._model.items():
            master = self._master[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.to(master.device, torch.float32)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def clear_model_gradients(self) -> None:
        """Clear the model's gradients, which the masters already contain."""
        for name, parameter in self._model.items():
            if self._master[name] is not parameter:
                parameter.grad = None

    def master_of(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the optimizer updates for a parameter of the model."""
        return self._of[id(parameter)]

    def scale(self, factor: float) -> None:
        """Multiply the gradient by ``factor``."""
        if gradients := [master.grad for master in self._master.values() if master.grad is not None]:
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]

    def clip(self) -> float:
        """Clip the gradient to ``grad_clip``; return its previous L2 norm, which is not finite if any part is not."""
        norm: Any = nn.utils.clip_grad_norm_(self._master.values(), self._config.grad_clip)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step(self, number: int, lr_factor: float = 1.0) -> float:
        """Update the weights as train step ``number`` of the run; return the learning rate, scaled by ``lr_factor``."""
        rate = learning_rate(self._config, number) * lr_factor
        set_rate(self._adam, rate)
        with stepping(next(iter(self._master.values())).device):
            self._adam.step()
        with torch.no_grad():
            for name, parameter in self._model.items():
                if self._master[name] is not parameter:
                    parameter.copy_(self._master[name])
        self.clear()
        return rate

    def snapshot(self) -> Snapshot:
        """Copy weights, masters and moments to main memory."""
        separate = [master for name, master in self._master.items() if master is not self._model[name]]
        return Snapshot([*self._model.values(), *separate], self._adam)

    def clear(self) -> None:
        """Discard the gradient."""
        for parameter in (*self._model.values(), *self._master.values()):
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Return all state that determines the next steps, by name: Adam's moments and counts, and separate masters."""
        state: dict[str, Tensor] = {}
        for name, master in self._master.items():
            for key, value in self._adam.state.get(master, {}).items():
                state |= {f"adam/{name}/{part}": tensor for part, tensor in plain_parts(key, value)}
            if master is not self._model[name]:
                state[f"master/{name}"] = master.detach()
        return state

    def target(self, full: str) -> Tensor:
        """Return the tensor to read a stored one into: the master itself, or a new one beside it.

        ``ValueError`` if the name belongs to no parameter.
        """
        kind, name, key = _parsed(full)
        if name not in self._master or kind not in ("adam", "master"):
            raise ValueError(f"tensor {full} belongs to no parameter")
        master = self._master[name].detach()
        if kind == "master":
            return master
        return empty_part(key, master)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Use the tensors of ``target`` as the state, without copying them."""
        states: dict[str, dict[str, Tensor]] = {}
        for full, value in tensors.items():
            kind, name, key = _parsed(full)
            if kind == "adam":
                states.setdefault(name, {})[key] = value
        for name, state in states.items():
            self._adam.state[self._master[name]] = joined(self._master[name], state)


def _parsed(full: str) -> tuple[str, str, str]:
    """Return kind, parameter and key of a name in ``tensors``: ``adam/NAME/KEY`` or ``master/NAME``."""
    kind, _, rest = full.partition("/")
    name, _, key = rest.rpartition("/") if kind == "adam" else (rest, "", "")
    return kind, name, key


def _master(parameter: Tensor, home: torch.device | None) -> Tensor:
    return parameter.detach().to(home or parameter.device, torch.float32).requires_grad_()


def groups(
    parameters: Iterable[Tensor], config: Trainer, ndim: Callable[[Tensor], int] = Tensor.dim
) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: matrices decay, vectors (norms, biases) do not. ``ndim``: of whole tensors."""
    every = list(parameters)
    decayed, plain = [p for p in every if ndim(p) >= 2], [p for p in every if ndim(p) < 2]
    both = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in both if group["params"]]
