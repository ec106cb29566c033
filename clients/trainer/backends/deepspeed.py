# pyright: basic, reportMissingImports=false
"""DeepSpeed's ZeRO over the ranks: stage 0 replicates, 1 shards the optimizer, 2 also gradients, 3 also the weights.

The optimizer is torch's AdamW over ZeRO's float32 partitions (DeepSpeed's own CPU optimizer takes minutes to build and
is slower). ZeRO averages over the ranks, hence the factor in ``backward``. It divides the summed gradient by a loss
scale before clipping; this is overridden with the step's scale, for the step only. ZeRO computes the gradient's norm
and takes the step in one call, so the optimizer below it refuses to step on a norm that is not finite.
"""

import importlib
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from staleflow.clients.models.files import load_random, random_file, shard_file
from staleflow.clients.models.optimizer_files import TensorFile
from staleflow.clients.trainer.backends.collectives import ManyRanks, OneRank
from staleflow.clients.trainer.backends.lr_schedule import learning_rate
from staleflow.clients.trainer.backends.optimizer import groups
from staleflow.clients.trainer.backends.sharded_files import WeightFiles, distinct, layers
from staleflow.clients.trainer.backends.snapshot import Snapshot
from staleflow.clients.trainer.backends.tensors import Shard, named
from staleflow.configs.loading.presence import DEEPSPEED, check_package
from staleflow.configs.schema import Config

_MASTER = "master"
_FOR_INFERENCE = "deepspeed_shm_comm"
"""C++ extension that DeepSpeed would build on CPUs before its first collective, only for ``inference_all_reduce``. The
build needs a compiler and up to minutes, and an interrupted build leaves a lock on which the next one waits
indefinitely."""
_RENAMED = r"`torch\.distributed\."
"""Start of torch 2.13's deprecation warning for renamed collectives, which ZeRO calls many times per step."""


class _GatedAdamW(torch.optim.AdamW):
    """AdamW that steps only if allowed: ZeRO steps it at startup without a gradient, and later whatever the norm is."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.allowed: Callable[[], bool] = _never

    def step(self, closure: Any = None) -> Any:
        return super().step(closure) if self.allowed() else None


def _never() -> bool:
    return False


def _clear_caches(kind: type) -> None:
    """Clear every ``lru_cache`` of a class whose methods DeepSpeed has wrapped once more."""
    for method in vars(kind).values():
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


class DeepspeedLearner:
    """``Learner`` over a DeepSpeed engine."""

    even = True

    def __init__(self, model: Any, config: Config, ranks: OneRank | ManyRanks, files: WeightFiles | None) -> None:
        check_package("trainer.backend", "deepspeed", "deepspeed", DEEPSPEED)
        if ranks.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed: Any = importlib.import_module("deepspeed")
        deepspeed.ops.__compatible_ops__[_FOR_INFERENCE] = False
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", _RENAMED, FutureWarning)
        self.model = model
        self._config = config.trainer
        self._ranks = ranks
        self._stage = config.trainer.zero_stage
        self.whole = self._stage < 3
        if files is not None:
            deepspeed.init_distributed(dist_init_required=False)
            self._partition(files, config, deepspeed.zero.Init)
        parameters = groups(model.parameters(), self._config, _ndim)
        self._adam = _GatedAdamW(parameters, lr=self._config.lr, betas=self._config.betas, eps=self._config.adam_eps)
        self._engine, self._zero, *_ = deepspeed.initialize(
            model=model, optimizer=self._adam, dist_init_required=False, config=settings(config)
        )
        self._first_pass = getattr(self._zero, "micro_step_id", 0)
        self._gathered = deepspeed.zero.GatheredParameters

    def forward(self, *, last: bool, **inputs: Any) -> Any:
        return self._engine(**inputs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._ranks.place.world)
        if not last:
            self._engine.step()

    def step(self, number: int, *, scale: float, take: bool, lr_factor: float = 1.0) -> float:
        rate = learning_rate(self._config, number) * lr_factor
        for group in self._adam.param_groups:
            group["lr"] = rate
        if self._stage == 0:
            norm = self._scaled_norm(scale)
            self._adam.allowed = lambda: take and math.isfinite(norm)
            self._engine.step()
            return norm
        self._adam.allowed = lambda: take and math.isfinite(self._norm())
        self._zero.override_loss_scale(1.0 / scale)
        self._engine.step()
        self._zero.override_loss_scale(1.0)
        return self._norm()

    def snapshot(self) -> Snapshot:
        """Copy ZeRO's float32 partitions, and the model's own weights or, in stage 3, this rank's part of them."""
        parameters = [*self.model.parameters()]
        if self._stage == 3:
            # Complete parameters still have the updated values. Released ones are gathered again from the parts.
            parts = [parameter.ds_tensor for parameter in parameters]
            return Snapshot([*self._masters(), *parts], self._adam, self._zero._partition_all_parameters)
        return Snapshot([*self._masters(), *(parameters if self._stage else ())], self._adam)

    def clear(self) -> None:
        """Clear all places where ZeRO keeps gradients between two passes of a step."""
        self._zero.zero_grad(set_to_none=True)
        for place in ("averaged_gradients", "all_grad_tensors"):
            getattr(self._zero, place, {}).clear()
        if hasattr(self._zero, "micro_step_id"):
            self._zero.micro_step_id = self._first_pass

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named(self.model):
            if self.whole or not hasattr(tensor, "ds_id"):
                yield name, tensor.detach()
            else:
                with self._gathered([tensor]):
                    yield name, tensor.detach()

    def shards(self) -> Iterator[Shard]:
        """Yield every tensor with this rank's partition of it (stage 3); rank 0 has what every rank has."""
        where = self._ranks.place
        tensor: Any
        for name, tensor in named(self.model):
            if hasattr(tensor, "ds_id"):
                # Flat and of equal size on every rank: the last ones are padded, or consist of padding only.
                partition = tensor.ds_tensor.detach().view(-1)
                start = min(where.rank * partition.numel(), tensor.ds_numel)
                own = partition[: tensor.ds_numel - start]
                yield Shard(name, own.dtype, tuple(tensor.ds_shape), start, own)
            else:
                yield Shard(name, tensor.dtype, tuple(tensor.shape), 0, tensor.detach() if where.leads else None)

    def state(self) -> list[TensorFile]:
        tensors: dict[str, Tensor] = {}
        for number, master in enumerate(self._masters()):
            tensors[f"{number}/{_MASTER}"] = master
            tensors |= {f"{number}/{key}": value for key, value in self._adam.state.get(master, {}).items()}
        where = self._ranks.place
        return [TensorFile(str(shard_file(self._name, where)), tensors), random_file(where.rank)]

    def check(self, directory: Path) -> None:
        shard_file(self._name, self._ranks.place, inside=directory)

    def load(self, directory: Path) -> None:
        masters = self._masters()
        for full, value in load_file(shard_file(self._name, self._ranks.place, inside=directory)).items():
            number, _, key = full.partition("/")
            master = masters[int(number)]
            if key == _MASTER:
                with torch.no_grad():
                    master.copy_(value)
            else:
                self._adam.state[master][key] = value if key == "step" else value.to(master.device)
        load_random(directory, self._ranks.place.rank, self._ranks.device)

    def close(self) -> None:
        """Remove DeepSpeed's hooks and what ZeRO-3 remembers of each pass, which would keep the model alive."""
        self._engine.destroy()
        if self._stage == 3:
            importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()
            coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
            _clear_caches(coordinator.PartitionedParameterCoordinator)

    def _partition(self, files: WeightFiles, config: Config, init: Callable[..., Any]) -> None:
        """Load a model on the meta device layer by layer: rank 0 reads, ZeRO distributes and keeps this rank's part."""
        leads, device, waiting = self._ranks.place.leads, self._ranks.device, distinct(self.model)
        for part in (*layers(self.model), self.model):
            wanted = {id(tensor) for tensor in (*part.parameters(), *part.buffers())}
            state: dict[str, Tensor] = {}
            for tensor, names in waiting:
                if id(tensor) not in wanted:
                    continue
                sharded, value = isinstance(tensor, nn.Parameter), torch.empty_like(tensor, device=device)
                if leads or not sharded:
                    files.read(files.stored(names), value)
                state |= dict.fromkeys(names, nn.Parameter(value) if sharded else value)
            self.model.load_state_dict(state, strict=False, assign=True)
            init(module=part, config_dict_or_path=settings(config))

    @property
    def _name(self) -> str:
        return f"deepspeed-zero{self._stage}"

    def _scaled_norm(self, scale: float) -> float:
        """Scale and clip the gradient without ZeRO; return its norm."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.grad_clip))

    def _norm(self) -> float:
        norm = self._zero._global_grad_norm
        return math.nan if norm is None or (self._zero.overflow and norm == 0) else float(norm)

    def _masters(self) -> list[Tensor]:
        """Return the tensors that AdamW updates here: ZeRO's flat float32 partitions, or the model's own parameters."""
        match self._stage:
            case 0:
                return [p for p in self.model.parameters() if p.requires_grad]
            case 3:
                return list(self._zero.fp32_partitioned_groups_flat)
            case _:
                return list(self._zero.single_partition_of_fp32_groups)


def _ndim(parameter: Any) -> int:
    """Return the dimensions of the whole parameter: ZeRO-3 leaves an empty placeholder, which records its shape."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def settings(config: Config) -> dict[str, Any]:
    """Return DeepSpeed's configuration. Learning rate and batch are managed by this trainer, not by DeepSpeed."""
    trainer = config.trainer
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1 << 62,
        "gradient_clipping": trainer.grad_clip if trainer.zero_stage else 0.0,
        "zero_optimization": {"stage": trainer.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }
