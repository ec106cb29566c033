# pyright: basic, reportMissingImports=false
"""One complete model on one rank."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from staleflow.clients.models.files import check_any_ranks, load_random, random_file
from staleflow.clients.models.optimizer_files import Part, TensorFile, optimizer_files, read_optimizer, whole
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

    def state(self) -> list[TensorFile]:
        where = self.ranks.place
        return [*optimizer_files(self.parts(), where), random_file(where.rank)]

    def parts(self) -> Iterator[Part]:
        """Yield this rank's part of the optimizer's state. Here it is equal on every rank, and rank 0 writes it."""
        if self.ranks.place.leads:
            yield from whole(self.optimizer.tensors())

    def check(self, directory: Path) -> None:
        check_any_ranks(directory)

    def load(self, directory: Path) -> None:
        check_any_ranks(directory)
        self.optimizer.load(read_optimizer(directory, self.optimizer.target))
        load_random(directory, self.ranks.place.rank, self.ranks.device)

    def close(self) -> None:
        """Do nothing: no other object references the model."""
