# pyright: basic, reportMissingImports=false
"""The interface of the shared train step to model storage: replicated, or sharded by FSDP or ZeRO."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from staleflow.clients.models.optimizer_files import TensorFile
from staleflow.clients.trainer.backends.collectives import ManyRanks, OneRank
from staleflow.clients.trainer.backends.sharded_files import WeightFiles
from staleflow.clients.trainer.backends.snapshot import Snapshot
from staleflow.clients.trainer.backends.tensors import Shard
from staleflow.configs.schema import Config


class Learner(Protocol):
    """The model and its optimizer on one rank."""

    model: Any
    """The model without backend wrappers; if sharded, every rank must call it equally often."""
    even: bool
    """True if every rank must run the same number of passes."""
    whole: bool
    """True if this rank's model is complete without the others."""

    def forward(self, *, last: bool, **inputs: Any) -> Any:
        """Return the model's output; ``last``: the next ``backward`` is the step's last."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of ``loss`` to the step's; gradients are summed over ranks at ``last`` at the latest."""
        ...

    def step(self, number: int, *, scale: float, take: bool, lr_factor: float = 1.0) -> float:
        """Return the L2 norm, before clipping, of the step's gradient: ``scale`` times the added gradients.

        Update the weights as train step ``number`` if the norm is finite and ``take`` is set, at ``lr_factor`` times
        its learning rate. The gradient is discarded in any case.
        """
        ...

    def snapshot(self) -> Snapshot:
        """Copy all state that ``step`` changes to main memory, to undo several of them."""
        ...

    def clear(self) -> None:
        """Discard the gradient. Call it on every rank."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name, complete, one at a time; tied ones once. Every rank must iterate."""
        ...

    def state(self) -> list[TensorFile]:
        """Return this rank's files: optimizer and random state, and master weights that differ from the model's."""
        ...

    def check(self, directory: Path) -> None:
        """Raise ``ConfigError`` if this backend cannot read the files of the backend, or the ranks, that wrote them."""
        ...

    def load(self, directory: Path) -> None:
        """Load the files of ``state``; raise ``ConfigError`` as ``check`` does."""
        ...

    def close(self) -> None:
        """Release the model, so that only the owner of this learner references it. Call it on every rank."""
        ...


@runtime_checkable
class ShardedLearner(Learner, Protocol):
    """A learner whose ranks have a part of the model each."""

    def shards(self) -> Iterator[Shard]:
        """Yield every tensor as ``tensors`` does, but with this rank's part of it only. No communication."""
        ...


def make_learner(config: Config, model: Any, ranks: OneRank | ManyRanks, files: WeightFiles | None = None) -> Learner:
    """Return the configured learner, which takes over ``model``. ``files``: unloaded weights (``open_model``)."""
    match config.trainer.backend:
        case "fsdp":
            from staleflow.clients.trainer.backends.fsdp import FsdpLearner

            return FsdpLearner(model, config, ranks, files)
        case "deepspeed":
            from staleflow.clients.trainer.backends.deepspeed import DeepspeedLearner

            return DeepspeedLearner(model, config, ranks, files)
        case "ddp":
            from staleflow.clients.trainer.backends.ddp import DdpLearner

            return DdpLearner(model, config, ranks)
        case _:
            from staleflow.clients.trainer.backends.single import PlainLearner

            return PlainLearner(model, config, ranks)
