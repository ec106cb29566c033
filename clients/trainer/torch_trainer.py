# pyright: basic, reportMissingImports=false
"""The train step of every torch backend: any causal language model of ``transformers``, on one rank or many.

By default there is one optimizer update per step. The ratio's reference policy (old) is the one at the start of the
step, so its log-probabilities are those of the trained forward pass, detached: one pass, no second copy of the weights.
``updates`` takes several updates per step. The ``objective`` defines loss and metrics, ``gradients`` runs the passes,
and the ``learner`` stores and updates the weights.
"""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from staleflow.clients.models.files import load_model, save_model
from staleflow.clients.models.gradient_checkpointing import checkpoint_gradients
from staleflow.clients.models.lora import adapt, load_adapter, published, save_adapter
from staleflow.clients.out_of_memory import first_line, out_of_memory
from staleflow.clients.trainer.algorithms.objective import Objective
from staleflow.clients.trainer.backends.base import (
    OutOfMemory,
    Published,
    StepResult,
    Stopping,
    Untrainable,
    batch_values,
    not_finite,
)
from staleflow.clients.trainer.backends.collectives import ManyRanks, OneRank
from staleflow.clients.trainer.backends.flops import FlopsMeter
from staleflow.clients.trainer.backends.host_copy import HostCopy
from staleflow.clients.trainer.backends.learner import Learner, ShardedLearner, make_learner
from staleflow.clients.trainer.backends.lr_schedule import learning_rate
from staleflow.clients.trainer.backends.sharded_files import WeightFiles, open_model
from staleflow.clients.trainer.backends.tensors import ModelShards, named, to_arrays
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.evaluation.held_out import Evaluation
from staleflow.clients.trainer.evaluation.sharded import accompany, lead
from staleflow.clients.trainer.gradients import Gradients, PassOutOfMemory
from staleflow.clients.trainer.model_passes import ModelPasses
from staleflow.clients.trainer.quarantine import GroupQuarantine
from staleflow.clients.trainer.updates import Updates
from staleflow.configs.schema import Config
from staleflow.process.main_memory import available
from staleflow.protocols.consistency.ids import Step, Version
from staleflow.protocols.wire.messages import ModelLimits

log = logging.getLogger(__name__)

MAX_COPY_SHARE = 0.8
"""Maximum share of the available main memory that the copy of a checkpoint may take."""


class TorchTrainer:
    """The model of ``directory``, its optimizer, and train steps. Deterministic on a CPU."""

    learner: Learner

    def __init__(
        self,
        config: Config,
        directory: Path,
        evaluation: Evaluation | None = None,
        ranks: OneRank | ManyRanks | None = None,
    ) -> None:
        if config.trainer.threads:
            torch.set_num_threads(config.trainer.threads)
        torch.set_float32_matmul_precision(config.model.matmul_precision)
        torch.manual_seed(config.seed)
        self._config = config
        self._directory = directory
        self._evaluation = evaluation
        self._ranks = ranks or OneRank(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self._objective = Objective(config, self._ranks.device, self._ranks)
        self._quarantine = GroupQuarantine(self._ranks)
        self._passes = ModelPasses(config, self._ranks)
        self._initial = False
        self._seconds = 0.0
        """Compute time of the current step so far."""
        self._wait_to_update: Callable[[], None] = lambda: None
        self._host_copy: HostCopy | None = None
        """The published weights of a GPU's model, if they are published while the next step trains."""
        self.load(None)
        self._passes.check()

    @property
    def model(self) -> Any:
        """Return the model without backend wrappers."""
        return self.learner.model

    @property
    def limits(self) -> ModelLimits:
        """Return the limits of the model's input."""
        config = self.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None) or 0
        return ModelLimits(vocabulary=config.vocab_size, context=context, **self._passes.replay.limits())

    def check(self, directory: Path) -> None:
        """Raise ``ConfigError`` for a checkpoint of a backend, or of ranks, that this one cannot read."""
        self.learner.check(directory)

    def load(self, directory: Path | None) -> None:
        """Load the state of a checkpoint, or the initial model (None). Call it on every rank."""
        if directory is None and self._initial:
            return
        if hasattr(self, "learner"):
            self._release_model()
        model, files = self._open(directory)
        self._passes.apply(model)
        if how := self._config.trainer.gradient_checkpointing:
            checkpoint_gradients(model, selective=how == "selective")
        self._flops = FlopsMeter(model, self._ranks, self._config.model)
        self.learner = make_learner(self._config, model, self._ranks, files)
        self._passes.use(self.learner, self._flops)
        self._gradients = Gradients(
            self._config,
            learner=self.learner,
            objective=self._objective,
            quarantine=self._quarantine,
            ranks=self._ranks,
            passes=self._passes,
        )
        self._initial = directory is None
        if directory is not None:
            self.learner.load(directory)

    def save(self, directory: Path) -> None:
        """Save model and tokenizer for ``from_pretrained``, optimizer and random state. Every rank writes its part."""
        self._save_model(directory, self.learner.tensors())
        for file in self.learner.state():
            file.write(directory)

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Copy this rank's part of ``save``; return the function that writes it. Call it on every rank."""
        learner, leads = self.learner, self._ranks.place.leads
        files, adapter = learner.state(), self._config.model.lora.rank > 0
        model = 0 if adapter or not leads else sum(map(_nbytes, dict(named(learner.model)).values()))
        needed, room = model + sum(file.nbytes for file in files), available()
        if needed > room * MAX_COPY_SHARE:
            log.warning(
                "checkpoint written before training continues: its copy needs %d MiB, %d MiB of main memory are free",
                needed >> 20,
                room >> 20,
            )
            self.save(directory)
            return _written
        if adapter:  # a few megabytes
            self._save_model(directory, learner.tensors())
        copies = [] if adapter else self._copied(learner.tensors())
        files = [file.copied() for file in files]

        def write() -> None:
            if not adapter:
                self._save_model(directory, copies)
            for file in files:
                file.write(directory)

        return write

    def _copied(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copy the model to main memory on rank 0; the other ranks take part in gathering it."""
        leads = self._ranks.place.leads
        return [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors if leads]

    def _save_model(self, directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Save model and tokenizer on rank 0, from all tensors of the model; an adapter has its own."""
        learner, model = self.learner, self._config.model
        if self._ranks.place.leads and model.lora.rank:
            base = model.path or str(self._directory.resolve())
            save_adapter(learner.model, directory, base=base, tokenizer_of=self._directory)
        elif self._ranks.place.leads:
            save_model(learner.model, tensors, directory, dtype=model.dtype, tokenizer_of=self._directory)
        elif not learner.whole:
            for _ in tensors:
                pass  # the other ranks take part in gathering

    def weights(self) -> Published:
        """Return views of the tensors (on a CPU), or tensors gathered one by one from all ranks; tied ones once.

        Of a model with an adapter, these are the adapter's tensors only.
        """
        if self._host_copy is not None:
            return self._host_copy.start(published(self.learner.model))
        if self.learner.whole:
            return to_arrays(published(self.learner.model))
        return self.sharded_weights()

    def sharded_weights(self) -> ModelShards:
        """Return this rank's view of ``weights``, if the model is sharded."""
        assert isinstance(self.learner, ShardedLearner)
        return ModelShards(self.learner.tensors, self.learner.shards)

    def set_before_update(self, wait: Callable[[], None]) -> None:
        """Wait for the publication before each update, or for the copy of a GPU's model, which is made now."""
        self._wait_to_update = wait
        if self.learner.whole and self._ranks.device.type == "cuda":
            self._host_copy = HostCopy(self._ranks.device)

    def _before_update(self) -> None:
        if self._host_copy is not None:
            self._host_copy.before_update()
        else:
            self._wait_to_update()

    def gather(self) -> None:
        """Take part in an iteration over ``weights`` on rank 0."""
        for _ in self.learner.tensors():
            pass

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        """Train the batch: by default in one optimizer update over all passes of all ranks.

        A loss or gradient that is not finite leaves everything unchanged, as does a batch without trained tokens. The
        values are those of the whole batch. ``OutOfMemory`` if a pass or the optimizer does not fit; ``Untrainable``,
        on every rank, if groups make the step raise.

        The first time that a pass does not fit, the step starts again with half of ``trainer.micro_tokens``, which then
        applies to all later steps. The division into passes does not change the gradient.
        """
        try:
            return self._train(batch, step, stopping)
        except PassOutOfMemory as error:
            reason = str(error)
        if not self._passes.halve():
            raise self._too_large(batch, reason)
        if self._ranks.place.leads:
            log.warning(
                "step %d: out of memory in a pass; it starts again, and the run continues, with trainer.micro_tokens %d"
                " instead of %d (%s)",
                step,
                self._passes.micro_tokens,
                self._config.trainer.micro_tokens,
                reason,
            )
        if self._ranks.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks of the larger passes would fragment the memory
        try:
            return self._train(batch, step, stopping)
        except PassOutOfMemory as error:
            reason = str(error)
        raise self._too_large(batch, reason)

    def begin(self) -> None:
        """Start or restart a step in parts, without any gradient."""
        self._begin()
        self.learner.clear()

    def add(self, part: TrainBatch, stopping: Stopping, *, last: bool) -> None:
        """Add the gradient of whole groups of the batch; ``last``: they complete it.

        Raise as ``train``, but without a second attempt: the gradients of the earlier parts would be lost.
        """
        try:
            self._add(part, stopping, last=last)
        except PassOutOfMemory as error:
            reason = str(error)
        else:
            return
        raise self._too_large(part, reason)

    def finish(self, batch: TrainBatch, step: Step) -> StepResult:
        """Update the weights as ``train`` does; ``batch`` is the concatenation of all parts."""
        started_at, scale = time.monotonic(), self._objective.scale()
        values = batch_values(batch, self._ranks.gather) | self._objective.values()
        values |= self._passes.values(self._ranks)
        lr_factor = self._objective.lr_factor()
        learns = values["trainer/tokens"] > 0  # on any rank; AdamW would move the weights even for a zero gradient
        # during the critic's warm-up neither weights nor moments move: its advantages are not the critic's yet
        moves = learns and step >= self._config.trainer.critic_warmup
        takes = moves and math.isfinite(values["loss"])
        if takes:
            waiting_at = time.monotonic()
            self._before_update()
            started_at += time.monotonic() - waiting_at
        try:
            norm = self.learner.step(step, scale=scale, take=takes, lr_factor=lr_factor)
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise self._no_room_to_step(batch, error) from error
            raise
        values["grad_norm"] = norm
        values |= self._flops.values(self._seconds + time.monotonic() - started_at)
        if bad := not_finite(loss=values["loss"], gradient_norm=norm):
            return StepResult(values=values, bad=bad)
        rate = self._rate(step, learns=learns)
        return StepResult(values=values | {name: value * lr_factor for name, value in rate.items()})

    def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
        """Return the mean reward of this model on the held-out prompts, on rank 0. A sharded model needs every rank.

        Raise ``OutOfMemory`` if the engine's passes do not fit.
        """
        if self._evaluation is None:
            return {}
        try:
            return self._evaluate(self._evaluation, version, stopping)
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                rows, reason = self._config.rollout.max_inflight, first_line(error)
                what = f"version {version}: out of memory during the evaluation on the held-out prompts"
                text = f"{what}. {self._new_run(f'rollout.max_inflight below {rows}')} ({reason})"
                # a complete model is evaluated on rank 0 alone, while the others wait for orders and can save
                raise OutOfMemory(text, can_save=self.learner.whole) from error
            raise

    def close(self) -> None:
        """Do nothing: no resources are held."""

    @property
    def together(self) -> bool:
        """True if weights and evaluation need every rank."""
        return not self.learner.whole

    def _release_model(self) -> None:
        """Release the model before loading another, as two may not fit. Sharding leaves reference cycles for the gc."""
        self.learner.close()
        self._passes.release()
        del self.learner, self._flops, self._gradients
        gc.collect()

    def _open(self, checkpoint: Path | None) -> tuple[Any, WeightFiles | None]:
        """Open the model; for a backend that shards, without its weights but with their files."""
        trainer, dtype, device = self._config.trainer, self._config.model.dtype, self._ranks.device
        if (lora := self._config.model.lora).rank:
            model = load_model(self._directory, dtype, device)
            adapt(model, lora, self._directory, seed=self._config.seed)
            if checkpoint is not None:
                load_adapter(model, checkpoint)
            elif lora.path:
                load_adapter(model, Path(lora.path), "model.lora.path")
            return model, None
        directory = checkpoint or self._directory
        if trainer.backend == "fsdp":  # its shards are the float32 masters, which each rank moves to its device
            return open_model(directory, "float32", torch.device("cpu"))
        if trainer.backend == "deepspeed" and trainer.zero_stage == 3:
            return open_model(directory, dtype, device)
        return load_model(directory, dtype, device), None

    def _evaluate(self, evaluation: Evaluation, version: Version, stopping: Stopping) -> dict[str, float]:
        with self._passes.compiled.paused():  # an engine's passes, with a cache, would be compiled once more
            if self.learner.whole:
                return evaluation.run(self.model, version, stopping)
            if self._ranks.place.leads:
                return lead(evaluation, self.model, version, self._ranks, stopping)
            accompany(self.model, self._ranks, stopping)
            return {}

    def _train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        """Train as ``train``, in one attempt. ``PassOutOfMemory`` on every rank, which leaves everything unchanged."""
        self._begin()
        if self._config.trainer.minibatches * self._config.trainer.epochs > 1:
            return self._train_in_updates(batch, step, stopping)
        self._add(batch, stopping, last=True, whole=True)
        return self.finish(batch, step)

    def _begin(self) -> None:
        self._objective.begin()
        self._flops.begin()
        self._passes.begin()
        self._seconds = 0.0

    def _add(self, part: TrainBatch, stopping: Stopping, *, last: bool, whole: bool = False) -> None:
        """Add a gradient. ``whole``: of the whole batch, whose trajectories are then balanced over the ranks."""
        started_at, gradients = self._started(part), self._gradients
        try:
            gradients.take(part)
            rows = gradients.balance(part) if whole else part
            passes = gradients.passes(rows)
            with self._passes.computing():
                if self._objective.surveys:
                    gradients.survey(rows, passes, stopping)
                gradients.add(rows, passes, stopping, last=last)
            self._quarantine.raise_if_any(part)
        except Untrainable:
            self.learner.clear()
            raise
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise self._too_large(part, first_line(error)) from error
            raise
        self._seconds += time.monotonic() - started_at

    def _started(self, batch: TrainBatch) -> float:
        """Prepare to compute with these rows; return the current time."""
        self._initial = False
        self._quarantine.clear()
        if self._config.trainer.mask_truncated:
            batch.mask_cut()
        return time.monotonic()

    def _train_in_updates(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        """Train as ``train``, in several updates."""
        started_at = self._started(batch)
        updates = Updates(
            self._config,
            learner=self.learner,
            gradients=self._gradients,
            objective=self._objective,
            quarantine=self._quarantine,
            ranks=self._ranks,
            before_update=self._before_update,
            no_room_to_copy=self._no_room_to_copy,
            no_room_to_step=self._no_room_to_step,
        )
        try:
            with self._passes.computing():
                result = updates.take(batch, step, stopping)
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise self._too_large(batch, first_line(error)) from error
            raise
        values = batch_values(batch, self._ranks.gather) | result.values | self._passes.values(self._ranks)
        values |= self._flops.values(time.monotonic() - started_at)
        if not result.bad:
            values = self._rate(step, learns=values["trainer/tokens"] > 0) | values
        return StepResult(values=values, bad=result.bad)

    def _rate(self, step: Step, *, learns: bool) -> dict[str, float]:
        """Return the learning rate of a step as a metric; warn about a step that has no token to train."""
        if learns:
            return {"lr": learning_rate(self._config.trainer, step)}
        if self._ranks.place.leads:
            log.warning("step %d: no token to train; batch consumed, weights unchanged", step)
        return {}

    def _too_large(self, batch: TrainBatch, reason: str) -> OutOfMemory:
        micro = self._passes.micro_tokens
        keys = f"trainer.micro_tokens below {micro} or trainer.gradient_checkpointing"
        # With several ranks, the others may be in a collective of this pass and cannot receive an order to save.
        alone = isinstance(self._ranks, OneRank)
        if alone:
            self.learner.clear()
        return OutOfMemory(self._memory_text(batch, "", keys, reason), can_save=alone)

    def _no_room_to_copy(self, batch: TrainBatch, error: Exception) -> OutOfMemory:
        keys = "trainer.minibatches and trainer.epochs at 1, which need no copy of the weights"
        text = self._memory_text(batch, " in the copy of the weights", keys, first_line(error))
        return OutOfMemory(text, can_save=isinstance(self._ranks, OneRank))

    def _no_room_to_step(self, batch: TrainBatch, error: Exception) -> OutOfMemory:
        """Return the error for an optimizer that does not fit. Some weights may have moved, so nothing can be saved."""
        keys = 'trainer.backend "fsdp" or "deepspeed" over more ranks (trainer.nproc)'
        text = self._memory_text(batch, " in the optimizer", keys, first_line(error))
        return OutOfMemory(text, can_save=False)

    def _memory_text(self, batch: TrainBatch, within: str, keys: str, reason: str) -> str:
        where = f" on rank {self._ranks.place.rank}" if self._ranks.place.world > 1 else ""
        return (
            f"step {batch.step}: out of memory{within}{where}; batch {batch.batch} of {len(batch.rewards)} trajectories"
            f" is kept. {self._new_run(keys)} ({reason})"
        )

    def _new_run(self, keys: str) -> str:
        """Return the remedy if a run cannot continue with its configured ``keys``."""
        return (
            f"A run's configuration is fixed: start a new one with {keys}, and {self._config.model.weights_key} at the "
            "newest checkpoint if there is one; its optimizer starts afresh"
        )


def _nbytes(tensor: Any) -> int:
    """Return the size of a whole tensor: ZeRO-3 leaves an empty placeholder, which records it."""
    return int(getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size())


def _written() -> None:
    """Do nothing: the checkpoint is written already."""
