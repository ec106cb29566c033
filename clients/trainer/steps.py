"""Compute steps from batches, each batch as a whole or in micro-batches while it fills; the loop commits them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from staleflow.clients.trainer.backends.base import Backend, StepResult, Stopping, StreamingBackend, Untrainable
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.micro_batches import concatenated


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedStep:
    """One computed step whose version is not published yet."""

    batch: TrainBatch
    result: StepResult
    waited_s: float
    """Seconds spent waiting for data."""
    trained_s: float


class Steps(Protocol):
    """Yield every step up to ``steps`` in order; end early after a stop request.

    Groups that the backend cannot train are quarantined, and the step uses the batch that is sealed in exchange.
    ``Untrainable`` if that would not help.
    """

    def __call__(self, client: TrainerClient, steps: int, stopping: Stopping) -> Iterator[ComputedStep]: ...


class WholeSteps:
    """Wait for a batch, then train it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, client: TrainerClient, steps: int, stopping: Stopping) -> Iterator[ComputedStep]:
        for batch in client.batches(steps):
            waited_s, started_at = client.waited_s, time.monotonic()
            try:
                result = self._backend.train(batch, batch.step, stopping)
            except Untrainable as error:
                if error.every:
                    raise
                client.quarantine(error.groups, str(error))
                continue
            yield ComputedStep(batch=batch, result=result, waited_s=waited_s, trained_s=time.monotonic() - started_at)


class StreamedSteps:
    """Train groups as they arrive, ``size`` at a time; take the step once the batch is complete."""

    def __init__(self, backend: StreamingBackend, size: int) -> None:
        self._backend = backend
        self._size = size

    def __call__(self, client: TrainerClient, steps: int, stopping: Stopping) -> Iterator[ComputedStep]:
        parts: list[TrainBatch] = []
        waited_s = trained_s = 0.0
        for micro_batch in client.stream(steps, size=self._size):
            waited_s += client.waited_s
            started_at = time.monotonic()
            if micro_batch.first:
                self._backend.begin()
                parts.clear()
            parts.append(micro_batch.data)
            try:
                self._backend.add(micro_batch.data, stopping, last=micro_batch.batch is not None)
            except Untrainable as error:
                client.quarantine(error.groups, str(error))
                trained_s += time.monotonic() - started_at
                continue
            if micro_batch.batch is None:
                trained_s += time.monotonic() - started_at
                continue
            batch = concatenated(parts, micro_batch.batch)
            result = self._backend.finish(batch, batch.step)
            trained_s += time.monotonic() - started_at
            yield ComputedStep(batch=batch, result=result, waited_s=waited_s, trained_s=trained_s)
            waited_s = trained_s = 0.0
