"""From batches to steps that are computed and wait for their commit: each batch in one, or in pieces as it fills."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from staleflow.clients.trainer.backends.base import Backend, StepResult, Stopping, StreamingBackend, Untrainable
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.micro_batches import joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """One step whose version is still to be published."""

    batch: TrainBatch
    result: StepResult
    waited_s: float
    """For data."""
    trained_s: float


class Steps(Protocol):
    """Every step up to ``steps``, one after the other; ends early when the process was asked to end.

    Groups that the backend cannot train are quarantined, and the step is taken with the batch that is sealed instead.
    ``Untrainable`` where that would not help.
    """

    def __call__(self, client: TrainerClient, steps: int, stopping: Stopping) -> Iterator[Computed]: ...


class WholeSteps:
    """A batch is waited for, then trained."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, client: TrainerClient, steps: int, stopping: Stopping) -> Iterator[Computed]:
        for batch in client.batches(steps):
            waited_s, began = client.waited_s, time.monotonic()
            try:
                result = self._backend.train(batch, batch.step, stopping)
            except Untrainable as error:
                if error.every:
                    raise
                client.quarantine(error.groups, str(error))
                continue
            yield Computed(batch=batch, result=result, waited_s=waited_s, trained_s=time.monotonic() - began)


class StreamedSteps:
    """Groups are trained as they come, ``size`` at once; the step is taken when the batch is whole."""

    def __init__(self, backend: StreamingBackend, size: int) -> None:
        self._backend = backend
        self._size = size

    def __call__(self, client: TrainerClient, steps: int, stopping: Stopping) -> Iterator[Computed]:
        parts: list[TrainBatch] = []
        waited_s = trained_s = 0.0
        for piece in client.stream(steps, size=self._size):
            waited_s += client.waited_s
            began = time.monotonic()
            if piece.first:
                self._backend.begin()
                parts.clear()
            parts.append(piece.data)
            try:
                self._backend.add(piece.data, stopping, last=piece.batch is not None)
            except Untrainable as error:
                client.quarantine(error.groups, str(error))
                trained_s += time.monotonic() - began
                continue
            if piece.batch is None:
                trained_s += time.monotonic() - began
                continue
            batch = joined(parts, piece.batch)
            result = self._backend.finish(batch, batch.step)
            trained_s += time.monotonic() - began
            yield Computed(batch=batch, result=result, waited_s=waited_s, trained_s=trained_s)
            waited_s = trained_s = 0.0
