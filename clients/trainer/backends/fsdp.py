# pyright: basic, reportMissingImports=false
"""FSDP2: weights, gradients and optimizer state sharded over the ranks; a layer is complete only while it computes.

The shards are the float32 master weights, which each rank reads from the files itself. A bfloat16 model computes in
bfloat16 copies of them, and gradients are reduced in float32. FSDP averages gradients, hence the factor in
``backward``.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from staleflow.clients.models.optimizer_files import Part, whole
from staleflow.clients.trainer.backends.collectives import Ranks
from staleflow.clients.trainer.backends.sharded_files import WeightFiles, distinct, layers
from staleflow.clients.trainer.backends.single import PlainLearner
from staleflow.clients.trainer.backends.tensors import Shard, named
from staleflow.configs.schema import Config


class FsdpLearner(PlainLearner):
    """``Learner`` over shards."""

    even = True
    whole = False

    def __init__(self, model: Any, config: Config, ranks: Ranks, files: WeightFiles | None) -> None:
        self._dtype = getattr(torch, config.model.dtype)
        self._wide = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        """Name parts of parameters that ``transformers`` always loads in float32, here and in engines. Buffers keep the
        model's dtype."""
        self._world = ranks.place.world
        mixed = self._dtype != torch.float32
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32) if mixed else None
        settings: dict[str, Any] = {"mesh": init_device_mesh(ranks.device.type, (self._world,))}
        if policy is not None:
            settings["mp_policy"] = policy
        offloads = config.trainer.offload == "parameters"
        if offloads:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
        for layer in layers(model):
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
        if files is not None:
            _fill(model, files, ranks, torch.device("cpu") if offloads else ranks.device)
        super().__init__(model, config, ranks)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        (loss * self._world).backward()  # type: ignore[no-untyped-call]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named(self.model):
            whole = tensor.detach().to(self._published_dtype(name, tensor))
            yield name, whole.full_tensor() if isinstance(whole, DTensor) else whole

    def shards(self) -> Iterator[Shard]:
        """Yield every tensor with this rank's rows; rank 0 has what every rank has."""
        where = self.ranks.place
        for name, tensor in named(self.model):
            dtype, shape = self._published_dtype(name, tensor), tuple(tensor.shape)
            if isinstance(tensor, DTensor):
                rows, own = _rows(shape[0], where.rank, where.world), tensor.to_local().detach()
                yield Shard(name, dtype, shape, rows.start * math.prod(shape[1:]), own)
            else:
                yield Shard(name, dtype, shape, 0, tensor.detach() if where.leads else None)

    def _published_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        wide = not isinstance(tensor, nn.Parameter) or any(f".{part}." in f".{name}." for part in self._wide)
        return tensor.dtype if wide else self._dtype

    def parts(self) -> Iterator[Part]:
        """Yield this rank's shards; rank 0 yields what every rank has."""
        state = self.optimizer.tensors()
        if self._dtype != torch.float32:  # the model's files have lower precision than the shards
            state |= {f"master/{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        where = self.ranks.place
        for name, tensor in state.items():
            if not isinstance(tensor, DTensor):
                yield from whole({name: tensor} if where.leads else {})
            elif (rows := _rows(tensor.shape[0], where.rank, where.world)).start < rows.stop:
                yield Part(name, tensor.to_local(), (rows.start, *[0] * (tensor.ndim - 1)))


def _fill(model: Any, files: WeightFiles, ranks: Ranks, home: torch.device) -> None:
    """Load this rank's shards into a sharded model on the meta device, tensor by tensor. ``home``: their device."""
    state: dict[str, Tensor] = {}
    for tensor, names in distinct(model):
        stored = files.stored(names)
        if isinstance(tensor, DTensor):
            rows = _rows(tensor.shape[0], ranks.place.rank, ranks.place.world)
            local = torch.empty_like(tensor.to_local(), device=home)
            # ``from_local`` moves to the device of the mesh, where an offloaded shard must not stay.
            filled: Tensor = nn.Parameter(_like(tensor, files.read(stored, local, rows)).to(home))
        else:
            filled = files.read(stored, torch.empty_like(tensor, device=ranks.device))
        state |= dict.fromkeys(names, filled)
    model.load_state_dict(state, assign=True)


def _rows(count: int, rank: int, world: int) -> slice:
    """Return a rank's part of the first dimension; FSDP splits it like ``torch.chunk``."""
    size = -(-count // world)
    return slice(min(rank * size, count), min((rank + 1) * size, count))


def _like(parameter: Any, local: Tensor) -> Tensor:
    """Wrap this rank's part of a tensor that is sharded like the parameter."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
