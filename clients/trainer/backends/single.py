# pyright: basic, reportMissingImports=false
"""One complete model on one rank."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from staleflow.clients.models.files import STATE, load_random, save_random, save_state, state_file
from staleflow.clients.trainer.backends.collectives import Ranks
from staleflow.clients.trainer.backends.optimizer import MasterAdamW
from staleflow.clients.trainer.backends.snapshot import Snapshot
from staleflow.clients.trainer.backends.tensors import named
from staleflow.configs.schema import Config


class PlainLearner:
    """``Learner`` without other ranks."""

    even = False
    whole = True

    def __init__(self, model: Any, config: Config, ranks: Ranks) -> None:
        self.model = model
        self.ranks = ranks
        self.optimizer = MasterAdamW(model, config.trainer)

    def forward(self, *, last: bool, **inputs: Any) -> Any:
        return self.model(**inputs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.collect()

    def step(self, number: int, *, scale: float, take: bool, lr_factor: float = 1.0) -> float:
        self.optimizer.scale(scale)
        norm = self.optimizer.clip()
        if take and math.isfinite(norm):
            self.optimizer.step(number, lr_factor)
        else:
            self.optimizer.clear()
        return norm

    def snapshot(self) -> Snapshot:
        return self.optimizer.snapshot()

    def clear(self) -> None:
        self.optimizer.clear()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from named(self.model)

    def save(self, directory: Path) -> None:
        """Save the optimizer's state, which is equal on every rank, so that any number of ranks can resume from it."""
        if self.ranks.place.leads:
            save_state(self.optimizer.tensors(), directory / STATE)
        save_random(directory, self.ranks.place.rank)

    def check(self, directory: Path) -> None:
        state_file(directory, STATE)

    def load(self, directory: Path) -> None:
        self.optimizer.load(load_file(state_file(directory, STATE)))
        load_random(directory, self.ranks.place.rank, self.ranks.device)

    def close(self) -> None:
        """Do nothing: no other object references the model."""
