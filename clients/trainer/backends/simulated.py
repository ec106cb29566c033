"""A trainer without a model: it sleeps, and publishes a few bytes that name the version. For trying the service."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from staleflow.clients.trainer.backends.base import StepResult, Stopped, Stopping, Weights
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.protocols.consistency.ids import Step, Version

_STATE = "simulated.json"
_POLL_INTERVAL_S = 0.05


class _State(msgspec.Struct, frozen=True):
    """The complete state: steps taken, and a checksum over every trained token of every batch."""

    steps: int = 0
    mixed: int = 0


class SimulatedTrainer:
    """A step of ``batch_size`` groups takes ``step_s`` seconds, in equal parts per group. As in real training, the
    weights are a function of the batches so far."""

    def __init__(self, step_s: float, batch_size: int) -> None:
        self._group_s = step_s / batch_size
        self._state = _State()
        self._tokens = 0

    def check(self, directory: Path) -> None:
        """Accept every checkpoint, as there is only one format."""

    def load(self, directory: Path | None) -> None:
        """Load the state of a checkpoint, or the initial state (None)."""
        self._state = _State()
        if directory is not None:
            self._state = msgspec.json.decode((directory / _STATE).read_bytes(), type=_State)

    def save(self, directory: Path) -> None:
        (directory / _STATE).write_bytes(msgspec.json.encode(self._state))

    def set_before_update(self, wait: Callable[[], None]) -> None:
        """Do nothing: each version is an array of its own."""

    def weights(self) -> Weights:
        return {"version": np.array([self._state.steps, self._state.mixed], np.int64)}

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        """Sleep, then take the step. ``Stopped`` on a stop request during the sleep."""
        self.begin()
        self.add(batch, stopping, last=True)
        return self.finish(batch, step)

    def begin(self) -> None:
        """Start or restart a step."""
        self._tokens = 0

    def add(self, part: TrainBatch, stopping: Stopping, *, last: bool) -> None:
        """Sleep for the groups of this part. ``Stopped`` on a stop request meanwhile."""
        end = time.monotonic() + self._group_s * len(np.unique(part.group_ids))
        while (left := end - time.monotonic()) > 0:
            if stopping():
                raise Stopped
            time.sleep(min(left, _POLL_INTERVAL_S))
        self._tokens += int((part.input_ids * part.loss_mask).sum())

    def finish(self, batch: TrainBatch, step: Step) -> StepResult:
        """Take the step."""
        mixed = (self._state.mixed * 1_000_003 + int(batch.digest[:8] or "0", 16) + self._tokens) % (1 << 62)
        self._state = _State(steps=step + 1, mixed=mixed)
        return StepResult(values={"loss": 0.0, "grad_norm": 0.0})

    def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
        """Return no metrics, as there is no model to evaluate."""
        return {}

    def close(self) -> None:
        """Do nothing: no resources are held."""
