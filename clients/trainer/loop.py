"""The life of a trainer: resume, join, then batch after batch until the last step. No torch, no sockets of its own.

Consumes: the sealed batch of step k, waits for it. Produces: version k + 1, and with it the end of batch k. A trainer
that is killed anywhere comes back at its newest whole checkpoint and is served the same batches again.

A step whose loss or gradient is not finite changes nothing but the version: its batch is consumed, the weights are
published as they were. The third such step in a row is not consumed, and the run stops with its batch kept.

A step whose batch was taken back meanwhile has moved the weights for nothing: they are neither published nor saved, and
``BadVersion`` ends the trainer. The run goes on, and so does the trainer that is started next.
"""

import logging
import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from staleflow.clients.out_of_memory import out_of_memory
from staleflow.clients.trainer.backends.base import Backend, NoBatch, OutOfMemory, Stopped, Untrainable, batch_values
from staleflow.clients.trainer.checkpoint import Checkpoints, Overtaken, TrainerState
from staleflow.clients.trainer.client import BadVersion, Fenced, TrainerClient
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.samples import Samples
from staleflow.clients.trainer.steps import Computed, Steps
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Lineage, Step, Version
from staleflow.protocols.wire.messages import JoinReply

log = logging.getLogger(__name__)

BAD_IN_A_ROW = 3
"""So many steps without a finite gradient are no accident."""


class GaveUp(Exception):
    """The run cannot go on; the text says why."""


@dataclass(slots=True)
class _Times:
    """Seconds of one step, by what they went into."""

    wait_for_batch: float = 0.0
    train: float = 0.0
    publish: float = 0.0

    def values(self, sampled_tokens: int) -> dict[str, float]:
        step = max(self.wait_for_batch + self.train + self.publish, 1e-9)
        return {
            "time/step": step,
            "time/wait_for_batch": self.wait_for_batch,
            "time/train": self.train,
            "time/publish": self.publish,
            "trainer/idle_ratio": self.wait_for_batch / step,
            "perf/tokens_per_second": sampled_tokens / step,
        }


class TrainingLoop:
    """One trainer. ``stop`` is set from outside; ``run`` then ends with a checkpoint of the last whole step."""

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
        """``steps``: how batches become steps of the backend. ``samples``: None where tokens mean nothing."""
        self._config = config
        self._steps = steps
        self._client = client
        self._backend = backend
        self._checkpoints = checkpoints
        self._stop = stop
        self._samples = samples
        self._state = TrainerState()
        self._saved: TrainerState | None = None
        self._oldest = Version(0)
        """The run keeps payload since this version, as far as this trainer knows."""

    def run(self) -> None:
        """Train up to the last step, until the run is drained, or until ``stop``.

        ``GaveUp`` after the run was told why. After ``Fenced`` and ``BadVersion`` what the backend holds is no version
        of the run: nothing is saved.
        """
        self._resume()
        self._client.on_wait = self._make_room
        try:
            self._evaluate_initial()
            for computed in self._steps(self._client, self._config.trainer.steps, self._stop.is_set):
                self._commit(computed)
            if self._state.version < self._config.trainer.steps and not self._client.drained:
                raise Stopped
        except Stopped:
            log.info("asked to end at version %d", self._state.version)
            self._save()
        except OutOfMemory as error:
            if error.can_save:
                self._save_in_little_memory()
            self._client.finished(str(error))
            raise GaveUp(str(error)) from error
        except (GaveUp, NoBatch, Untrainable) as error:
            self._save()
            self._client.finished(str(error))
            raise GaveUp(str(error)) from error
        else:
            self._save()
            self._client.finished()

    def _resume(self) -> None:
        """Join with the newest whole checkpoint that the service takes, or with the initial model."""
        refused: dict[TrainerState, str] = {}
        while True:
            before = self._checkpoints.paths()
            try:
                path, state, joined = self._join_newest(refused)
                break
            except BadVersion as error:
                if self._checkpoints.paths() == before:  # else another trainer has saved one meanwhile
                    raise self._nothing_left(refused, str(error)) from error
        self._state = msgspec.structs.replace(state, lineage=joined.lineage)
        source = "the initial model" if path is None else str(path)
        for damage in self._checkpoints.set_aside(self._state):
            version, _, _ = damage.path.name.partition(".")
            log.warning(
                "checkpoint %s is damaged (%s): set aside as %s, resumed from %s at version %d",
                *(version, damage.why, damage.path, source, state.version),
            )
        log.info("resumed from %s", source)
        self._backend.load(path)
        self._saved = self._state  # the model directory is the checkpoint of version 0
        self._checkpoints.drop_after(self._state, refused)
        if joined.version < 0:
            self._client.publish_initial(self._backend.weights())
        else:
            self._client.holds(self._backend.weights())

    def _join_newest(self, refused: dict[TrainerState, str]) -> tuple[Path | None, TrainerState, JoinReply]:
        """The checkpoint that the service took, None for the initial model. ``BadVersion`` when it takes neither."""
        for path, state in self._checkpoints.newest():
            self._backend.check(path)  # before the trainer that wrote it is fenced
            try:
                return path, state, self._client.join(state.lineage, state.version)
            except BadVersion as error:
                log.error("checkpoint %s is not used: %s", path, error)
                refused[state] = str(error)
        return None, TrainerState(), self._client.join(Lineage(0), Version(0))

    def _nothing_left(self, refused: dict[TrainerState, str], initial: str) -> ConfigError:
        """Starting the trainer again would not help: a person has to choose. Everything stays where it is."""
        checkpoints = self._checkpoints
        reasons = [f"{damage.path.name} is damaged ({damage.why})" for damage in checkpoints.damaged]
        reasons += [f"{state.version} is refused ({why})" for state, why in refused.items()]
        reasons.append(f"the initial model is refused ({initial})")
        model = str(checkpoints.newest_model() or self._config.model.path or "DIRECTORY")
        model += " model.build= model.options={}" if self._config.model.build else ""
        allowed = (
            f"the run can resume from none of them: {'; '.join(reasons)}; put the files back as they were, or start a "
            f"new run with model.path={model} (its optimizer starts afresh)"
        )
        return ConfigError("checkpoints", str(checkpoints.folder), allowed)

    def _commit(self, computed: Computed) -> None:
        batch, result = computed.batch, computed.result
        times = _Times(wait_for_batch=computed.waited_s, train=computed.trained_s)
        values = batch_values(batch) | result.values
        state = self._after(batch, result.bad, int(values["trainer/tokens"]))
        started = time.monotonic()
        self._client.commit(self._backend.weights())
        times.publish = time.monotonic() - started
        self._state = state
        if self._samples is not None:
            self._samples.write(batch)
        values |= times.values(int(values["trainer/sampled_tokens"]))
        values["trainer/bad_steps"] = float(state.bad_steps)
        if keep := self._checkpoints_due():
            values["time/checkpoint"] = self._save(
                keep
            )  # a kill during the evaluation must not cost the steps before it
        try:
            values |= self._evaluate()
        finally:
            self._client.metrics(batch.step, finite(values))

    def _after(self, batch: TrainBatch, bad: str, tokens: int) -> TrainerState:
        """The state that the commit of this batch leads to. ``GaveUp`` when there must be none."""
        state = self._state
        if bad:
            row = state.bad_in_a_row + 1
            if row >= BAD_IN_A_ROW:
                raise GaveUp(f"step {batch.step}: {bad}, the {ordinal(row)} in a row; batch {batch.batch} is kept")
            log.error("step %d: %s; its batch is consumed, the weights stay (%d in a row)", batch.step, bad, row)
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
        """How many checkpoints to keep payload for, this version's being one of them; 0 where none is due.

        One is due every ``checkpoint_every`` steps, and earlier when payload kept for a rollback crowds out new work:
        then the one before it is kept, and no more.
        """
        due = self._state.version % self._config.trainer.checkpoint_every == 0
        if not self._client.crowded():
            return self._checkpoints.keep if due else 0
        if not due:
            log.warning(
                "version %d: a checkpoint before its time; the trajectory servers are filling", self._state.version
            )
        return min(self._checkpoints.keep, 2)

    def _make_room(self) -> None:
        """A batch waits for a push that waits for room: with a checkpoint of this version all consumed payload can go.

        That gives up the older checkpoints, but a run that waits for ever is worth less than their payload.
        """
        if self._oldest < self._state.version and self._client.full():
            log.warning(
                "version %d: a checkpoint before its time, and payload is kept for no older one; the trajectory servers"
                " are full",
                self._state.version,
            )
            self._save(keep=1)

    def _is_saved(self) -> bool:
        return self._saved is not None and self._saved.version == self._state.version

    def _save(self, keep: int | None = None) -> float:
        """Write a checkpoint of the newest version, unless there is one; return the seconds it took. ``Fenced``.

        ``keep``: register it as one of so few, whether there was one or not.
        """
        started = time.monotonic()
        if not self._is_saved():
            try:
                path = self._checkpoints.save(self._state, self._backend.save)
            except Overtaken as error:
                raise Fenced(f"another trainer has joined the run, this one stops ({error})") from error
            log.info("checkpoint %s", path)
            self._saved = self._state
        elif keep is None:
            return 0.0
        lineage, version = self._state.lineage, self._state.version
        oldest = self._client.checkpointed(lineage, version, keep=keep or self._checkpoints.keep)
        if oldest is not None:
            self._oldest = oldest
            self._checkpoints.tidy(self._state, oldest)
        return time.monotonic() - started

    def _save_in_little_memory(self) -> None:
        """A checkpoint, if what is left of the memory is enough for it: the run must be told why it ends either way."""
        try:
            self._save()
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            log.error("version %d: no memory for a checkpoint either", self._state.version)

    def _evaluate_initial(self) -> None:
        """What the held-out prompts say of the model before the first step: the line of step -1."""
        if values := self._evaluate():
            self._client.metrics(Step(self._state.version - 1), finite(values))

    def _evaluate(self) -> dict[str, float]:
        """Metrics on held-out prompts of version 0, of every ``eval_every``-th and of the last; once each."""
        trainer, version = self._config.trainer, self._state.version
        every = trainer.eval_every and version % trainer.eval_every == 0
        if not (every or version in (0, trainer.steps)) or self._state.evaluated == version:
            return {}
        started = time.monotonic()
        values = self._backend.evaluate(version, self._stop.is_set)
        self._state = msgspec.structs.replace(self._state, evaluated=int(version))
        return values | {"time/eval": time.monotonic() - started} if values else {}


def finite(values: dict[str, float]) -> dict[str, float]:
    """Without what no JSON can hold; a NaN loss is named in the log and counted, not averaged."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
