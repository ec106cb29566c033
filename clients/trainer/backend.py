"""What the training loop asks of a backend, and what a step gives back. No torch here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.trainer.batches import TrainBatch
from staleflow.protocols.consistency.ids import Step, Version

Weights = Mapping[str, NDArray[Any]]
"""Tensors by name, as ``state_dict`` names them; bfloat16 as its bits in uint16, as on the wire."""

Stopping = Callable[[], bool]
"""True once the process was asked to end."""


class Stopped(Exception):
    """The process was asked to end, and what was under way is undone: weights and optimizer are as before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one train step did."""

    values: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics by name."""
    bad: str = ""
    """Names the loss or gradient that was not finite; then weights and optimizer are as before."""


class Backend(Protocol):
    """The model and its optimizer. One owner, one thread."""

    def load(self, directory: Path | None) -> None:
        """Take the state of a checkpoint, or of the initial model (None)."""
        ...

    def save(self, directory: Path) -> None:
        """Put everything that ``load`` needs for bit-identical steps into an empty directory."""
        ...

    def weights(self) -> Weights:
        """What the engines are to load; valid until the next step."""
        ...

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        """One optimizer step. ``Stopped`` when asked to end before it was taken."""
        ...

    def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
        """Metrics on the held-out prompts, empty without any; changes nothing. ``Stopped`` when asked to end."""
        ...

    def close(self) -> None: ...


def mean_std(values: NDArray[Any]) -> tuple[float, float]:
    """Population mean and deviation; zeros for nothing."""
    return (float(values.mean()), float(values.std())) if values.size else (0.0, 0.0)


def batch_values(batch: TrainBatch) -> dict[str, float]:
    """Metrics that every backend reports alike."""
    lengths = batch.completion_lengths
    sampled = int(lengths.sum())
    reward, spread = mean_std(batch.rewards.astype(np.float64))
    mean_age, max_age = batch.off_policy()
    return {
        "reward/mean": reward,
        "reward/std": spread,
        "length/mean": mean_std(lengths)[0],
        "length/p99": float(np.percentile(lengths, 99)) if lengths.size else 0.0,
        "off_policy/mean": mean_age,
        "off_policy/max": float(max_age),
        "staleness/masked_token_ratio": batch.masked_tokens / max(1, sampled),
        "trainer/tokens": float(batch.trained_tokens),
    }
