"""A version that is being published while its trainer continues.

At most one exists at a time, so a trainer is never more than one version ahead of the run (docs/consistency.md).
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from staleflow.clients.background import Cancellable
from staleflow.clients.trainer.backends.base import Published
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.errors import raise_refusal
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.messages import Batch


@dataclass(slots=True, kw_only=True, eq=False)
class Publication:
    """One version and its outcome. ``run`` runs on the client's loop; the trainer's thread reads the flags."""

    lineage: Lineage
    version: Version
    batch: TrainBatch | Batch
    """The batch that it consumes."""
    weights: Mapping[str, Any] | Published | None
    """The weights, for as long as they have the bytes of this version; then None."""
    gathered: bool
    """True if the weights are gathered during the iteration, which must end before the next step."""
    read: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the weights are no longer read, so that they may change."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the version is registered, or never will be."""
    error: BaseException | None = None
    """The reason why it never will be."""
    seconds: float = 0.0
    """Duration from the start until ``done``."""
    _ended: threading.Event = field(default_factory=threading.Event)
    """``done`` for other threads."""
    _task: Cancellable | None = None

    async def run(self, publish: Coroutine[Any, Any, Any]) -> None:
        """Publish, and record the outcome."""
        started = time.monotonic()
        try:
            await publish
        except BaseException as error:  # raised again in the trainer's thread
            self.error = self.error or error
            if not isinstance(error, Exception):
                raise
        finally:
            self.seconds = time.monotonic() - started
            self.read.set()
            self.done.set()
            self._ended.set()

    def started(self, task: Cancellable) -> None:
        """Set the task of ``run``."""
        self._task = task

    def cancel(self, error: Exception) -> None:
        """End it without an outcome: the version may exist or not. ``error`` is raised in threads that wait for it."""
        if not self._ended.is_set():
            self.error = error
            if self._task is not None:
                self._task.cancel()
            self._ended.set()

    def join(self) -> None:
        """Wait for the end, in any thread."""
        self._ended.wait()

    def raise_error(self) -> None:
        """Raise the error that ended it, if any, as ``TrainerClient.commit`` raises it."""
        if isinstance(self.error, Refused):
            raise_refusal(self.error, self.version, self.batch)
        if self.error is not None:
            raise self.error
