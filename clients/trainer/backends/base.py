"""The interface between the training loop and its backends. No torch in this module."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.column_means import column_means
from staleflow.clients.weights import NamedTensors
from staleflow.protocols.consistency.ids import GroupId, Step, Version

Array = NDArray[Any]

Weights = Mapping[str, Array]
"""Tensors by ``state_dict`` name; bfloat16 as its bits in uint16, as on the wire."""

Published = NamedTensors
"""Weights that a backend publishes: ``Weights``, or tensors that are gathered during the iteration."""

Stopping = Callable[[], bool]
"""Return True once a stop was requested."""

MAX_NAMED = 8
"""Maximum number of groups that an error names."""


class Stopped(Exception):
    """A stop was requested, and the operation was undone: weights and optimizer are unchanged."""


class Untrainable(Exception):
    """Some groups of a batch make the step raise; weights and optimizer are unchanged on every rank."""

    def __init__(self, groups: Sequence[GroupId], why: str, *, every: bool = False) -> None:
        named = ", ".join(map(str, groups[:MAX_NAMED])) + (", ..." if len(groups) > MAX_NAMED else "")
        whole = "no group of the batch can be trained, so the model or the algorithm is at fault: " if every else ""
        super().__init__(f"{whole}groups {named}: {why}")
        self.groups = groups
        self.every = every
        """No group of a batch of several can be trained, so quarantining them would not help."""


class OutOfMemory(Exception):
    """A step does not fit this device; the text names the step and the settings to change."""

    def __init__(self, text: str, *, can_save: bool = False) -> None:
        super().__init__(text)
        self.can_save = can_save
        """Weights and optimizer are unchanged, and no other rank waits for this one within a pass, so that ``save``
        succeeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one train step."""

    values: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics by name."""
    bad: str = ""
    """The loss or gradient that was not finite; if set, weights and optimizer are unchanged."""


class Backend(Protocol):
    """The model and its optimizer, with one owner and one thread."""

    def check(self, directory: Path) -> None:
        """Raise ``ConfigError`` for a complete checkpoint that ``load`` cannot read. Changes nothing."""
        ...

    def load(self, directory: Path | None) -> None:
        """Load a checkpoint, or the initial model (None)."""
        ...

    def save(self, directory: Path) -> None:
        """Write everything that ``load`` needs for bit-identical steps into an empty directory."""
        ...

    def weights(self) -> Published:
        """Return the weights for the engines; valid until the next step."""
        ...

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        """Take the optimizer updates of one step, all or none.

        Raise ``Stopped`` on a stop request before they are taken, or ``Untrainable``.
        """
        ...

    def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
        """Return metrics on the held-out prompts, empty without any. Changes nothing. ``Stopped`` on a stop request."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class StreamingBackend(Backend, Protocol):
    """A backend that accepts a step's batch in parts: ``begin``, ``add`` each, ``finish``. Equivalent to ``train``."""

    def begin(self) -> None:
        """Start or restart a step, discarding the parts added before."""
        ...

    def add(self, part: TrainBatch, stopping: Stopping, *, last: bool) -> None:
        """Process some whole groups; ``last``: they complete the batch.

        Raise ``Stopped`` on a stop request, or ``Untrainable``, after which the step restarts.
        """
        ...

    def finish(self, batch: TrainBatch, step: Step) -> StepResult:
        """Take the step; ``batch`` is the concatenation of all parts."""
        ...


@runtime_checkable
class AsyncBackend(Backend, Protocol):
    """A backend that can write a checkpoint while it trains."""

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Copy everything that ``save`` writes to main memory; return the function that writes it, in any thread.

        Without enough memory, write it at once; the function then has nothing left to do.
        """
        ...


@runtime_checkable
class OverlapBackend(Backend, Protocol):
    """A backend that trains a step while the weights of the version before are still being published."""

    def set_before_update(self, wait: Callable[[], None]) -> None:
        """Call ``wait`` right before any change of the tensors that ``weights`` returned; it may raise.

        Without this call, weights do not change while they are published. Weights that are copies, which stay as they
        are until the next call of ``weights``, need no ``wait``.
        """
        ...


def not_finite(**numbers: float) -> str:
    """Return the first number that is not finite, with its name; empty if all are finite."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            return f"{name.replace('_', ' ')} is {value}"
    return ""


def mean_std(values: NDArray[Any]) -> tuple[float, float]:
    """Return population mean and deviation; zeros for an empty array."""
    return (float(values.mean()), float(values.std())) if values.size else (0.0, 0.0)


def _alone(values: NDArray[Any]) -> NDArray[Any]:
    return values


def batch_values(batch: TrainBatch, gather: Callable[[NDArray[Any]], NDArray[Any]] = _alone) -> dict[str, float]:
    """Return the metrics common to all backends. ``gather`` concatenates one column over the rows of every rank."""
    lengths = gather(batch.sampled_lengths)
    sampled = int(lengths.sum())
    reward, spread = mean_std(gather(batch.rewards).astype(np.float64))
    cut = gather(batch.cut.astype(np.float64))
    age = int(batch.step) - batch.token_versions[batch.loss_mask]
    sums = gather(np.array([[age.sum(), age.size, batch.masked_tokens, age.max(initial=0)]], np.int64))
    ages, trained, masked, _ = sums.sum(axis=0).tolist()
    surprise = gather(np.array([batch.behavior_logprobs[batch.loss_mask].sum(dtype=np.float64)])).sum()
    return {
        "reward/mean": reward,
        "reward/std": spread,
        "length/mean": mean_std(lengths)[0],
        "length/p99": float(np.percentile(lengths, 99)) if lengths.size else 0.0,
        "length/truncated": float(cut.mean()) if cut.size else 0.0,
        "entropy": -float(surprise) / max(1, trained),
        "off_policy/mean": ages / max(1, trained),
        "off_policy/max": float(sums[:, 3].max()),
        "staleness/masked_token_ratio": masked / max(1, sampled),
        "trainer/tokens": float(trained),
        "trainer/sampled_tokens": float(sampled),
    } | column_means(batch, gather)
