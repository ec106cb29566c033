"""What the training loop asks of a backend, and what a step gives back. No torch here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.weights import NamedTensors
from staleflow.protocols.consistency.ids import GroupId, Step, Version

Array = NDArray[Any]

Weights = Mapping[str, Array]
"""Tensors by name, as ``state_dict`` names them; bfloat16 as its bits in uint16, as on the wire."""

Published = NamedTensors
"""What a backend gives to be published: ``Weights``, or the same gathered while somebody goes through them."""

Stopping = Callable[[], bool]
"""True once the process was asked to end."""

MAX_NAMED = 8
"""Groups that an error names."""


class Stopped(Exception):
    """The process was asked to end, and what was under way is undone: weights and optimizer are as before it."""


class Drained(Exception):
    """The run drains and has no further batch; the text is the reason. Nothing is wrong."""


class NoBatch(Exception):
    """The scheduler says that the batch of a step can never come; the text says why."""


class Untrainable(Exception):
    """Some groups of a batch make the step raise; weights and optimizer are as before, on every rank."""

    def __init__(self, groups: Sequence[GroupId], why: str, *, every: bool = False) -> None:
        named = ", ".join(map(str, groups[:MAX_NAMED])) + (", ..." if len(groups) > MAX_NAMED else "")
        whole = "no group of the batch can be trained, so the model or the algorithm is at fault: " if every else ""
        super().__init__(f"{whole}groups {named}: {why}")
        self.groups = groups
        self.every = every
        """No group of a batch of several can be trained: to quarantine them would not help."""


class OutOfMemory(Exception):
    """A step does not fit this device; the text says which, and what to change."""

    def __init__(self, text: str, *, can_save: bool = False) -> None:
        super().__init__(text)
        self.can_save = can_save
        """Weights and optimizer are as before, and no other rank waits for this one in the middle of a pass: ``save``
        comes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one train step did."""

    values: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics by name."""
    bad: str = ""
    """Names the loss or gradient that was not finite; then weights and optimizer are as before."""


class Backend(Protocol):
    """The model and its optimizer. One owner, one thread."""

    def check(self, directory: Path) -> None:
        """``ConfigError`` for a complete checkpoint that ``load`` cannot take; changes nothing."""
        ...

    def load(self, directory: Path | None) -> None:
        """Take the state of a checkpoint, or of the initial model (None)."""
        ...

    def save(self, directory: Path) -> None:
        """Put everything that ``load`` needs for bit-identical steps into an empty directory."""
        ...

    def weights(self) -> Published:
        """What the engines are to load; valid until the next step."""
        ...

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        """One optimizer step. ``Stopped`` when asked to end before it was taken; ``Untrainable``."""
        ...

    def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
        """Metrics on the held-out prompts, empty without any; changes nothing. ``Stopped`` when asked to end."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class StreamingBackend(Backend, Protocol):
    """One that can take a step's batch in parts: ``begin``, ``add`` each, ``finish``. The same step as ``train``."""

    def begin(self) -> None:
        """A step begins, or begins again: forget the parts that were added."""
        ...

    def add(self, part: TrainBatch, stopping: Stopping, *, last: bool) -> None:
        """Take in some whole groups; ``last``: they complete the batch. ``Stopped`` when asked to end meanwhile;
        ``Untrainable``: then the step begins again."""
        ...

    def finish(self, batch: TrainBatch, step: Step) -> StepResult:
        """Take the step; ``batch``: every part that was added, as one."""
        ...


def mean_std(values: NDArray[Any]) -> tuple[float, float]:
    """Population mean and deviation; zeros for nothing."""
    return (float(values.mean()), float(values.std())) if values.size else (0.0, 0.0)


def _alone(values: NDArray[Any]) -> NDArray[Any]:
    return values


def batch_values(batch: TrainBatch, gather: Callable[[NDArray[Any]], NDArray[Any]] = _alone) -> dict[str, float]:
    """Metrics that every backend reports alike. ``gather``: one column of every rank's rows, as one array."""
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
    }
