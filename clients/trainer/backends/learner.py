# pyright: basic, reportMissingImports=false
"""What the shared train step asks of a way to hold and move weights: replicated, or sharded by FSDP or ZeRO."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from staleflow.clients.trainer.backends.collectives import ManyRanks, OneRank
from staleflow.clients.trainer.backends.sharded_files import WeightFiles
from staleflow.configs.schema import Config


class Learner(Protocol):
    """The model and its optimizer on one rank."""

    model: Any
    """The model itself, without what a backend wraps round it; when it is sharded every rank calls it equally often."""
    even: bool
    """True when every rank must run equally many passes."""
    whole: bool
    """True when this rank's model is complete without the others."""

    def forward(self, *, last: bool, **inputs: Any) -> Any:
        """The model's output; ``last`` says that the next ``backward`` is the step's last."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of ``loss`` to the step's; all of the ranks are summed, at ``last`` at the latest."""
        ...

    def step(self, number: int, *, scale: float, take: bool) -> float:
        """The L2 norm of the step's gradient, ``scale`` times what was added, from before clipping. Moves the weights
        as train step ``number`` if the norm is finite and ``take``; the gradient is forgotten in any case."""
        ...

    def clear(self) -> None:
        """Forget the gradient. Every rank does."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model by its name, complete, one at a time; tied ones once. Every rank goes through."""
        ...

    def save(self, directory: Path) -> None:
        """Optimizer and random state, and master weights beside the model's."""
        ...

    def check(self, directory: Path) -> None:
        """``ConfigError`` if other ranks or another backend left what is there."""
        ...

    def load(self, directory: Path) -> None:
        """Take what ``save`` left; ``ConfigError`` as ``check``."""
        ...

    def close(self) -> None:
        """Let go of the model: nothing but the owner of this learner holds it any more. Every rank does."""
        ...


def make_learner(config: Config, model: Any, ranks: OneRank | ManyRanks, files: WeightFiles | None = None) -> Learner:
    """The configured one; ``model`` is its own from now on. ``files``: where its weights still are (``open_model``)."""
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
