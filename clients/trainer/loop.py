"""The lifecycle of a trainer: resume, join, then batch after batch until the last step. No torch or sockets here.

Consumes and waits for: the sealed batch of step k. Produces: version k + 1, which ends batch k. A trainer that is
killed at any point restarts from its newest complete checkpoint and gets the batch of that step again, byte for byte.

A step whose loss or gradient is not finite changes only the version number: its batch is consumed, and the weights are
published unchanged. The third such step in a row is not consumed, and the run stops with its batch kept.

If a batch is revoked during its step, the updated weights are void: they are neither published nor saved, and
``BadVersion`` ends the trainer. The run continues with the trainer that is started next.

Version k + 1 is published while step k + 1 trains (``trainer.overlap_publish``): the step waits only before it changes
weights that are still being read. One version is under way at a time, and the checkpoint of a version exists only once
the version is published.
"""

import logging
import math
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from staleflow.clients.out_of_memory import out_of_memory
from staleflow.clients.trainer.backends.base import (
    Backend,
    OutOfMemory,
    OverlapBackend,
    Stopped,
    Untrainable,
    batch_values,
)
from staleflow.clients.trainer.checkpoint import Checkpoints, TrainerState
from staleflow.clients.trainer.checkpoint_writer import CheckpointWriter
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.prefetch import NoBatch
from staleflow.clients.trainer.drift import DriftWatch
from staleflow.clients.trainer.errors import BadVersion
from staleflow.clients.trainer.samples import Samples
from staleflow.clients.trainer.steps import ComputedStep, Steps
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Lineage, Step, Version
from staleflow.protocols.wire.messages import JoinReply

log = logging.getLogger(__name__)

MAX_BAD_STEPS = 3
"""A series of this length without a finite gradient is not an accident."""


class GaveUp(Exception):
    """The run cannot continue; the text is the reason."""


class NotPublished(Exception):
    """Memory ran out in the publication of the version before; the text is the error."""


@dataclass(slots=True)
class _Times:
    """Seconds of one step by activity. All but ``train`` are stalls."""

    wait_for_batch: float
    train: float
    publish: float
    """Training waited for a publication, or for the copy that is published."""
    checkpoint: float = 0.0
    evaluate: float = 0.0

    def values(self, sampled_tokens: int) -> dict[str, float]:
        stalled = self.wait_for_batch + self.publish + self.checkpoint + self.evaluate
        step = max(self.train + stalled, 1e-9)
        return {
            "time/step": step,
            "time/wait_for_batch": self.wait_for_batch,
            "time/train": self.train,
            "time/publish": self.publish,
            "time/checkpoint": self.checkpoint,
            "time/eval": self.evaluate,
            "trainer/idle_ratio": stalled / step,
            "perf/tokens_per_second": sampled_tokens / step,
        }


class TrainingLoop:
    """One trainer. After ``stop`` is set from outside, ``run`` ends with a checkpoint of the last complete step."""

    def __init__(
        self,
        config: Config,
        *,
        client: TrainerClient,
        backend: Backend,
        checkpoints: Checkpoints,
        steps: Steps,
        stop: threading.Event,
        samples: Samples | None = None,
    ) -> None:
        """``steps``: turns batches into steps of the backend. ``samples``: None if tokens have no meaning."""
        self._config = config
        self._steps = steps
        self._client = client
        self._backend = backend
        self._checkpoints = checkpoints
        self._stop = stop
        self._samples = samples
        self._drift = DriftWatch(config)
        self._state = TrainerState()
        self._overlaps = config.trainer.overlap_publish and isinstance(backend, OverlapBackend)
        self._blocked_s = 0.0
        """Seconds that the current step has waited for a publication."""
        if self._overlaps and isinstance(backend, OverlapBackend):
            backend.set_before_update(self._before_update)
        self._writer = CheckpointWriter(checkpoints, client, backend, asynchronous=config.trainer.async_checkpoints)

    def run(self) -> None:
        """Train up to the last step, until the run is drained, or until ``stop``.

        Raise ``GaveUp`` after reporting the reason to the run. After ``Fenced`` or ``BadVersion`` no checkpoint is
        started, since the backend's weights are not a version of the run.
        """
        self._resume()
        self._client.on_wait = self._while_waiting
        try:
            self._run()
        finally:
            self._client.cancel_commit()  # none is under way unless an error ends the trainer
            self._writer.close()

    def _run(self) -> None:
        try:
            self._evaluate_initial()
            for computed in self._steps(self._client, self._config.trainer.steps, self._stop.is_set):
                self._commit(computed)
            if self._state.version < self._config.trainer.steps and not self._client.drained:
                raise Stopped
        except Stopped:
            log.info("stopped on request at version %d", self._state.version)
            self._writer.save(self._state)
        except OutOfMemory as error:
            if error.can_save:
                self._save_in_little_memory()
            self._client.finished(str(error))
            raise GaveUp(str(error)) from error
        except (GaveUp, NoBatch, Untrainable) as error:
            self._writer.save(self._state)
            self._client.finished(str(error))
            raise GaveUp(str(error)) from error
        else:
            self._writer.save(self._state)
            self._client.finished()

    def _resume(self) -> None:
        """Join with the newest complete checkpoint that the service accepts, or with the initial model."""
        refused: dict[TrainerState, str] = {}
        while True:
            before = self._checkpoints.paths()
            try:
                path, state, reply = self._join_newest(refused)
                break
            except BadVersion as error:
                if self._checkpoints.paths() == before:  # otherwise another trainer has saved one meanwhile: retry
                    raise self._nothing_left(refused, str(error)) from error
        self._state = msgspec.structs.replace(state, lineage=reply.lineage)
        self._checkpoints.term = reply.trainer_term
        source = "the initial model" if path is None else str(path)
        for damage in self._checkpoints.set_aside(self._state):
            version, _, _ = damage.path.name.partition(".")
            log.warning(
                "checkpoint %s is damaged (%s): set aside as %s, resumed from %s at version %d",
                *(version, damage.why, damage.path, source, state.version),
            )
        log.info("resumed from %s", source)
        self._backend.load(path)
        self._writer.saved = self._state  # version 0 needs no checkpoint, as the model directory serves as one
        self._checkpoints.drop_after(self._state, refused)
        if reply.version < 0:
            self._client.publish_initial(self._backend.weights())
        else:
            self._client.holds(self._backend.weights())

    def _join_newest(self, refused: dict[TrainerState, str]) -> tuple[Path | None, TrainerState, JoinReply]:
        """Join and return the accepted checkpoint, None for the initial model. ``BadVersion`` if all are rejected."""
        for path, state in self._checkpoints.newest():
            self._backend.check(path)  # before joining, which fences the trainer that wrote it
            try:
                return path, state, self._client.join(state.lineage, state.version)
            except BadVersion as error:
                log.error("checkpoint %s not used: %s", path, error)
                refused[state] = str(error)
        return None, TrainerState(), self._client.join(Lineage(0), Version(0))

    def _nothing_left(self, refused: dict[TrainerState, str], initial: str) -> ConfigError:
        """Return an error that an operator must resolve, as a restart would not help. All files stay in place."""
        checkpoints = self._checkpoints
        reasons = [f"{damage.path.name} is damaged ({damage.why})" for damage in checkpoints.damaged]
        reasons += [f"{state.version} is rejected ({why})" for state, why in refused.items()]
        reasons.append(f"the initial model is rejected ({initial})")
        model = self._config.model
        newest = checkpoints.newest_model() or (model.lora.path if model.lora.rank else model.path) or "DIRECTORY"
        allowed = (
            f"the run can resume from none of them: {'; '.join(reasons)}; put the files back as they were, or start a "
            f"new run with {model.starting_from(str(newest))} (its optimizer starts afresh)"
        )
        return ConfigError("checkpoints", str(checkpoints.folder), allowed)

    def _commit(self, computed: ComputedStep) -> None:
        batch, result = computed.batch, computed.result
        values = batch_values(batch) | result.values
        self._drift.observe(batch.step, values)  # before the weights of this step are published
        state = self._after(batch, result.bad, int(values["trainer/tokens"]))
        train_s = max(computed.trained_s - self._blocked_s, 0.0)
        self._publish()
        times = _Times(wait_for_batch=computed.waited_s, train=train_s, publish=self._blocked_s)
        self._blocked_s = 0.0
        if not self._overlaps:
            values["time/publish_total"] = times.publish
        self._state = state
        if self._samples is not None:
            self._samples.write(batch)
        values["trainer/bad_steps"] = float(state.bad_steps)
        self._writer.poll()
        if keep := self._checkpoints_due():
            # Save before the evaluation: a kill during it must not cost the steps before it.
            times.checkpoint = self._writer.start(self._state, keep)
        started = time.monotonic()
        try:
            if evaluated := self._evaluate():
                values |= evaluated
                times.evaluate = time.monotonic() - started
        finally:
            values |= times.values(int(values["trainer/sampled_tokens"]))
            self._client.metrics(batch.step, finite(values))

    def _publish(self) -> None:
        """Publish the weights of the trained step, or start to."""
        with self._blocked():
            if self._overlaps:
                self._client.finish_commit()  # ``weights`` may reuse the memory of the previous version
                self._client.begin_commit(self._backend.weights())
            else:
                self._client.commit(self._backend.weights())

    def _before_update(self) -> None:
        """Wait until the weights of the previous version may change."""
        with self._blocked():
            try:
                self._client.before_update()
            except (MemoryError, RuntimeError) as error:
                if out_of_memory(error):  # the step would take it for its own
                    raise NotPublished(repr(error)) from error
                raise

    @contextmanager
    def _blocked(self) -> Generator[None]:
        """Count the time of the block as waiting for a publication."""
        started = time.monotonic()
        yield
        self._blocked_s += time.monotonic() - started

    def _after(self, batch: TrainBatch, bad: str, tokens: int) -> TrainerState:
        """Return the state after the commit of this batch. ``GaveUp`` if it must not be committed."""
        state = self._state
        if bad:
            row = state.bad_in_a_row + 1
            if row >= MAX_BAD_STEPS:
                raise GaveUp(f"step {batch.step}: {bad}, the {ordinal(row)} in a row; batch {batch.batch} is kept")
            log.error("step %d: %s; batch consumed, weights unchanged (%d in a row)", batch.step, bad, row)
        return msgspec.structs.replace(
            state,
            version=Version(batch.step + 1),
            last_batch=batch.batch,
            last_digest=batch.digest,
            tokens_trained=state.tokens_trained + (0 if bad else tokens),
            bad_steps=state.bad_steps + bool(bad),
            bad_in_a_row=state.bad_in_a_row + 1 if bad else 0,
        )

    def _checkpoints_due(self) -> int:
        """Return the number of checkpoints to keep payload for, including this version's; 0 if none is due.

        One is due every ``checkpoint_every`` steps, and earlier if payload kept for a rollback leaves no room for new
        work; then only the one before it is kept as well.
        """
        due = self._state.version % self._config.trainer.checkpoint_every == 0
        if not self._client.crowded():
            return self._checkpoints.keep if due else 0
        if not due:
            if self._writer.writing:
                return 0  # the checkpoint that makes room is being written
            log.warning(
                "version %d: saving an early checkpoint, the trajectory servers are filling up", self._state.version
            )
        return min(self._checkpoints.keep, 2)

    def _while_waiting(self) -> None:
        """Register a checkpoint that is complete meanwhile, and make room if the batch waits for it."""
        self._writer.poll()
        self._make_room()

    def _make_room(self) -> None:
        """Save a checkpoint if a full server blocks the pushes that the batch waits for: it frees all consumed payload.

        This gives up the older checkpoints, which are worth less than a run that can proceed.
        """
        if self._writer.oldest < self._state.version and self._client.full():
            log.warning(
                "version %d: saving an early checkpoint and keeping payload for no older one, the trajectory servers"
                " are full",
                self._state.version,
            )
            self._writer.save(self._state, keep=1)

    def _save_in_little_memory(self) -> None:
        """Try to save a checkpoint in the remaining memory; the run must learn why it ends in either case."""
        try:
            self._writer.save(self._state)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            log.error("version %d: not enough memory for a checkpoint either", self._state.version)

    def _evaluate_initial(self) -> None:
        """Evaluate the model before the first step; reported as step -1."""
        started = time.monotonic()
        if values := self._evaluate():
            values |= {"time/eval": time.monotonic() - started}
            self._client.metrics(Step(self._state.version - 1), finite(values))

    def _evaluate(self) -> dict[str, float]:
        """Evaluate version 0, every ``eval_every``-th and the last version on held-out prompts, each once."""
        trainer, version = self._config.trainer, self._state.version
        every = trainer.eval_every and version % trainer.eval_every == 0
        if not (every or version in (0, trainer.steps)) or self._state.evaluated == version:
            return {}
        values = self._backend.evaluate(version, self._stop.is_set)
        self._state = msgspec.structs.replace(self._state, evaluated=int(version))
        return values


def finite(values: dict[str, float]) -> dict[str, float]:
    """Drop values that JSON cannot represent; a NaN loss is logged and counted instead."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
