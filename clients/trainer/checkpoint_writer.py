"""Write the checkpoints of a trainer, register them with the run, and delete what they replace.

A checkpoint may be written in a thread while the next steps train. One is written at a time: the next one waits for
it. It is registered by the trainer's own thread once it is complete and durable, as any other; until then the run keeps
the payload since the checkpoint before, and a kill leaves that one.

A version may still be being published while its checkpoint is written. The checkpoint is complete only after that: if
the trainer is killed before, another one may publish other weights as the same version.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from staleflow.clients.trainer.backends.base import AsyncBackend, Backend
from staleflow.clients.trainer.checkpoint import Checkpoints, Overtaken, TrainerState
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.errors import fenced
from staleflow.protocols.consistency.ids import Version

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint in the thread."""

    state: TrainerState
    keep: int
    done: Future[Path]


class CheckpointWriter:
    """The checkpoints that one trainer writes. Its methods belong to the trainer's thread and may raise ``Fenced``."""

    def __init__(
        self, checkpoints: Checkpoints, client: TrainerClient, backend: Backend, *, asynchronous: bool
    ) -> None:
        self._checkpoints = checkpoints
        self._client = client
        self._backend = backend
        self._background = backend if asynchronous and isinstance(backend, AsyncBackend) else None
        self._pending: _Pending | None = None
        self.saved: TrainerState | None = None
        """The newest state with a complete checkpoint."""
        self.oldest = Version(0)
        """The oldest version for which the run keeps payload, as known to this trainer."""

    @property
    def writing(self) -> bool:
        """True while a checkpoint is not registered yet."""
        return self._pending is not None

    def start(self, state: TrainerState, keep: int) -> float:
        """Write a checkpoint while the trainer continues, if the backend can; return the seconds that it waited."""
        started = time.monotonic()
        self.finish()
        if self._background is None or self._is_saved(state):
            self.save(state, keep)
        else:
            part = self._checkpoints.begin(state)
            try:
                with self._checkpoints.writing(part):
                    write = self._background.begin_save(part)
            except Overtaken as error:
                raise fenced(error) from error
            done = self._in_thread(state, part, write, self._client.commit_result())
            self._pending = _Pending(state, keep, done)
        return time.monotonic() - started

    def save(self, state: TrainerState, keep: int | None = None) -> float:
        """Write a checkpoint unless it exists; return the seconds it took.

        ``keep``: register it as one of ``keep`` checkpoints, even if it already exists.
        """
        started = time.monotonic()
        self.finish()
        if self._is_saved(state):
            if keep is not None:
                self._register(state, keep)
        else:
            try:
                path = self._checkpoints.save(state, self._backend.save, self._client.finish_commit)
            except Overtaken as error:
                raise fenced(error) from error
            log.info("checkpoint %s", path)
            self._register(state, keep)
        return time.monotonic() - started

    def poll(self) -> None:
        """Register the checkpoint in the thread if it is complete, or raise the error that ended it. Never waits."""
        if self._pending is not None and self._pending.done.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint in the thread and register it, or raise the error that ended it."""
        if self._pending is None:
            return
        if not self._pending.done.done():
            self._client.wait_published(self._pending.state.version)  # unlike the wait below, a stop ends it
        pending, self._pending = self._pending, None
        try:
            path = pending.done.result()
        except Overtaken as error:
            raise fenced(error) from error
        log.info("checkpoint %s", path)
        self._register(pending.state, pending.keep)

    def close(self) -> None:
        """Wait for the thread. Its checkpoint is complete on disk, but not registered; an error is logged."""
        if self._pending is not None and (error := self._pending.done.exception()) is not None:
            log.error("checkpoint of version %d not written: %r", self._pending.state.version, error)
        self._pending = None

    def _in_thread(
        self, state: TrainerState, part: Path, write: Callable[[], None], published: Callable[[], None]
    ) -> Future[Path]:
        done: Future[Path] = Future()

        def run() -> None:
            try:
                done.set_result(self._checkpoints.finish(state, part, write, published))
            except BaseException as error:  # raised again in the trainer's thread
                done.set_exception(error)

        threading.Thread(target=run, name="checkpoint", daemon=True).start()
        return done

    def _is_saved(self, state: TrainerState) -> bool:
        return self.saved is not None and self.saved.version == state.version

    def _register(self, state: TrainerState, keep: int | None) -> None:
        self.saved = state
        oldest = self._client.checkpointed(state.lineage, state.version, keep=keep or self._checkpoints.keep)
        if oldest is not None:
            self.oldest = oldest
            self._checkpoints.tidy(state, oldest)
