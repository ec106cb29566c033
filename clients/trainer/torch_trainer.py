# pyright: basic, reportMissingImports=false
"""The train step of every torch backend: any causal language model of ``transformers``, on one rank or many.

There is one optimizer step per batch. The ratio's reference policy (old) is the one at the start of the step, so its
log-probabilities are those of the trained forward pass, detached: one pass, no second copy of the weights. The
``objective`` defines loss and metrics; the ``learner`` stores and updates the weights. Each rank processes its own
rows. Ranks with fewer passes than others idle at the beginning, so that the last passes of all run together; with
sharded weights they run passes without effect instead.
"""

import gc
import logging
import math
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.models.files import checkpoint_gradients, load_model, save_model, save_streamed
from staleflow.clients.models.passes import computed, packed_passes, padded_passes, shared_passes
from staleflow.clients.out_of_memory import out_of_memory
from staleflow.clients.trainer.algorithms.objective import Objective, tokens_of
from staleflow.clients.trainer.backends.base import (
    OutOfMemory,
    Published,
    StepResult,
    Stopped,
    Stopping,
    Untrainable,
    batch_values,
)
from staleflow.clients.trainer.backends.collectives import ManyRanks, OneRank
from staleflow.clients.trainer.backends.flops import FlopsMeter
from staleflow.clients.trainer.backends.forward import completion_logprobs, isolates_packed_rows
from staleflow.clients.trainer.backends.learner import Learner, make_learner
from staleflow.clients.trainer.backends.lr_schedule import learning_rate
from staleflow.clients.trainer.backends.prompt_attention import sharing_attention
from staleflow.clients.trainer.backends.prompt_layout import shared_lengths
from staleflow.clients.trainer.backends.sharded_files import WeightFiles, open_model
from staleflow.clients.trainer.backends.shared_prompts import shared_logprobs, why_not_shared
from staleflow.clients.trainer.backends.tensors import StreamedWeights, to_arrays
from staleflow.clients.trainer.data.batch import TrainBatch, rows_of
from staleflow.clients.trainer.evaluation.held_out import Evaluation
from staleflow.clients.trainer.evaluation.sharded import accompany, lead
from staleflow.clients.trainer.quarantine import GroupQuarantine
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Step, Version
from staleflow.protocols.wire.messages import ModelLimits

log = logging.getLogger(__name__)


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
        torch.set_num_threads(config.trainer.threads)
        torch.manual_seed(config.seed)
        self._config = config
        self._directory = directory
        self._evaluation = evaluation
        self._ranks = ranks or OneRank(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self._objective = Objective(config, self._ranks.device, self._ranks)
        self._quarantine = GroupQuarantine(self._ranks)
        self._initial = False
        self._has_advantages = False
        """True if all rows of the current part have advantages; otherwise its passes have no effect."""
        self._seconds = 0.0
        """Compute time of the current step so far."""
        self.load(None)
        several = config.rollout.group_size > 1
        self._shares_prompts = config.trainer.share_prompts and several and self._can_share_prompts()
        if config.trainer.packing and not self._shares_prompts:
            self._check_packing()

    @property
    def model(self) -> Any:
        """Return the model without backend wrappers."""
        return self.learner.model

    @property
    def limits(self) -> ModelLimits:
        """Return the limits of the model's input."""
        config = self.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None) or 0
        return ModelLimits(vocabulary=config.vocab_size, context=context)

    def check(self, directory: Path) -> None:
        """Raise ``ConfigError`` if another backend, or another number of ranks, wrote this checkpoint."""
        self.learner.check(directory)

    def load(self, directory: Path | None) -> None:
        """Load the state of a checkpoint, or the initial model (None). Call it on every rank."""
        if directory is None and self._initial:
            return
        if hasattr(self, "learner"):
            self._release_model()
        model, files = self._open(directory or self._directory)
        if self._config.trainer.gradient_checkpointing:
            checkpoint_gradients(model)
        self._flops = FlopsMeter(model, self._ranks, self._config.model.dtype)
        self.learner = make_learner(self._config, model, self._ranks, files)
        self._initial = directory is None
        if directory is not None:
            self.learner.load(directory)

    def save(self, directory: Path) -> None:
        """Save model and tokenizer for ``from_pretrained``, optimizer and random state. Every rank writes its part."""
        learner, leads = self.learner, self._ranks.place.leads
        if not learner.whole:
            tensors = learner.tensors()
            if leads:
                dtype = self._config.model.dtype
                save_streamed(learner.model, tensors, directory, dtype=dtype, tokenizer_of=self._directory)
            for _ in tensors:
                pass  # the other ranks take part in gathering
        elif leads:
            save_model(learner.model, directory, tokenizer_of=self._directory)
        learner.save(directory)

    def weights(self) -> Published:
        """Return views of the tensors (on a CPU), or tensors gathered one by one from all ranks; tied ones once."""
        if self.learner.whole:
            return to_arrays(self.learner.model.state_dict())
        return StreamedWeights(self.learner.tensors)

    def gather(self) -> None:
        """Take part in an iteration over ``weights`` on rank 0."""
        for _ in self.learner.tensors():
            pass

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        """Take one optimizer step over all passes of all ranks.

        A loss or gradient that is not finite leaves everything unchanged, as does a batch without trained tokens. The
        values are those of the whole batch. ``OutOfMemory`` if a pass or the optimizer does not fit; ``Untrainable``,
        on every rank, if groups make the step raise.
        """
        self._objective.begin()
        self._flops.begin()
        self._seconds = 0.0
        self.add(batch, stopping, last=True)
        return self.finish(batch, step)

    def begin(self) -> None:
        """Start or restart a step in parts, without any gradient."""
        self._objective.begin()
        self._flops.begin()
        self._seconds = 0.0
        self.learner.clear()

    def add(self, part: TrainBatch, stopping: Stopping, *, last: bool) -> None:
        """Add the gradient of whole groups of the batch; ``last``: they complete it. Raises as ``train``."""
        self._initial, started_at = False, time.monotonic()
        self._quarantine.clear()
        if self._config.trainer.mask_truncated:
            part.mask_cut()
        try:
            with sharing_attention(self.model) if self._shares_prompts else nullcontext():
                self._add(part, stopping, last=last)
            self._quarantine.raise_if_any(part)
        except Untrainable:
            self.learner.clear()
            raise
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise self._too_large(part, error) from error
            raise
        self._seconds += time.monotonic() - started_at

    def finish(self, batch: TrainBatch, step: Step) -> StepResult:
        """Update the weights as ``train`` does; ``batch`` is the concatenation of all parts."""
        started_at, scale = time.monotonic(), self._objective.scale()
        values = batch_values(batch, self._ranks.gather) | self._objective.values()
        learns = values["trainer/tokens"] > 0  # on any rank; AdamW would move the weights even for a zero gradient
        try:
            norm = self.learner.step(step, scale=scale, take=learns and math.isfinite(values["loss"]))
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise self._no_room_to_step(batch, error) from error
            raise
        values["grad_norm"] = norm
        values |= self._flops.values(self._seconds + time.monotonic() - started_at)
        if bad := not_finite(loss=values["loss"], gradient_norm=norm):
            return StepResult(values=values, bad=bad)
        if not learns:
            if self._ranks.place.leads:
                log.warning("step %d: no token to train; batch consumed, weights unchanged", step)
            return StepResult(values=values)
        values["lr"] = learning_rate(self._config.trainer, step)
        return StepResult(values=values)

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
                text = f"{what}. {new_run(f'rollout.max_inflight below {rows}')} ({reason})"
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
        del self.learner, self._flops
        gc.collect()

    def _open(self, directory: Path) -> tuple[Any, WeightFiles | None]:
        """Open the model; for a backend that shards, without its weights but with their files."""
        trainer, dtype, device = self._config.trainer, self._config.model.dtype, self._ranks.device
        if trainer.backend == "fsdp":  # its shards are the float32 masters, which each rank moves to its device
            return open_model(directory, "float32", torch.device("cpu"))
        if trainer.backend == "deepspeed" and trainer.zero_stage == 3:
            return open_model(directory, dtype, device)
        return load_model(directory, dtype, device), None

    def _evaluate(self, evaluation: Evaluation, version: Version, stopping: Stopping) -> dict[str, float]:
        if self.learner.whole:
            return evaluation.run(self.model, version, stopping)
        if self._ranks.place.leads:
            return lead(evaluation, self.model, version, self._ranks, stopping)
        accompany(self.model, self._ranks, stopping)
        return {}

    def _add(self, batch: TrainBatch, stopping: Stopping, *, last: bool) -> None:
        objective, cuts = self._objective, self._passes(batch)
        self._take(batch)
        if objective.surveys:
            self._survey(batch, cuts, stopping)
        for number, which in enumerate(cuts):
            self._check_stop(stopping)
            closes = last and number == len(cuts) - 1
            if which is not None:
                logprobs = self._logprobs_or_quarantine(batch, which, last=closes)
                if logprobs is not None:
                    self.learner.backward(self._loss(batch, which, logprobs), last=closes)
            elif self.learner.even:
                self.learner.backward(self._idle_pass(batch), last=closes)

    def _take(self, batch: TrainBatch) -> None:
        """Compute the advantages of the rows. Groups that raise are recorded, which voids the step."""
        objective, self._has_advantages = self._objective, False
        try:
            objective.take(batch)
            self._has_advantages = True
        except Exception as error:
            if not objective.by_group:
                raise
            everything = np.arange(len(batch.rewards))
            self._quarantine.record(batch, everything, error, lambda rows: objective.take(rows_of(batch, rows)))

    def _logprobs_or_quarantine(self, batch: TrainBatch, which: NDArray[np.int64], *, last: bool) -> Tensor | None:
        """Return ``_logprobs``, or None if a group makes the pass raise.

        Ranks that compute together cannot test a group alone, so with several ranks the error ends the process.
        """
        try:
            return self._logprobs(batch, which, last=last)
        except Exception as error:
            if not isinstance(self._ranks, OneRank):
                raise
            self._quarantine.record(batch, which, error, lambda rows: self._logprobs(batch, rows, last=False))
            return None

    def _loss(self, batch: TrainBatch, which: NDArray[np.int64], logprobs: Tensor) -> Tensor:
        """Return the loss of one pass; 0 if a group makes it raise, so that every rank finishes its passes."""
        objective, device = self._objective, self._ranks.device
        nothing = logprobs.sum() * 0.0
        if not self._has_advantages:
            return nothing

        def alone(rows: NDArray[np.int64]) -> None:
            of_rows = np.isin(np.repeat(which, batch.completion_lengths[which]), rows)
            objective.loss(logprobs.detach()[torch.from_numpy(of_rows).to(device)], tokens_of(batch, rows, device))

        try:
            return objective.loss(logprobs, tokens_of(batch, which, device))
        except Exception as error:
            self._quarantine.record(batch, which, error, alone)
            return nothing

    def _passes(self, batch: TrainBatch) -> list[NDArray[np.int64] | None]:
        """Return the rows of each pass, starting with None for each pass that only another rank has."""
        trainer, lengths, groups = self._config.trainer, batch.sequence_lengths, batch.group_ids
        shared = shared_lengths(batch) if self._shares_prompts else np.zeros_like(lengths)
        if self._shares_prompts:
            cuts = shared_passes(lengths, shared, groups, trainer.micro_tokens)
        else:
            cuts = (packed_passes if trainer.packing else padded_passes)(lengths, trainer.micro_tokens)
        for which in cuts:
            tokens, squares = computed(lengths[which], shared[which], groups[which])
            logits = int(batch.completion_lengths[which].sum()) if self._shares_prompts else tokens
            self._flops.count(tokens=tokens, squares=squares, logits=logits)
        most = int(self._ranks.max(torch.tensor([len(cuts)]))[0])
        return [*[None] * (most - len(cuts)), *cuts]

    def _can_share_prompts(self) -> bool:
        """Return whether every rank can, and log the reason otherwise. Call it on every rank."""
        forward, backward = partial(self._logits, last=False), partial(self.learner.backward, last=False)
        reason = why_not_shared(self.model, forward, backward, self._ranks.device)
        self.learner.clear()
        if reason:
            log.info("this model computes the prompt of a group once for each sample: %s", reason)
        return not self._ranks.any(bool(reason))

    def _check_packing(self) -> None:
        """Raise ``ConfigError`` for a model that mixes the trajectories of a packed pass. Call it on every rank."""
        forward, backward = partial(self._logits, last=False), partial(self.learner.backward, last=False)
        isolated = isolates_packed_rows(forward, backward, self.model.get_input_embeddings(), self._ranks.device)
        self.learner.clear()
        if not isolated:
            raise ConfigError("trainer.packing", True, "this model mixes packed trajectories; set it to false")

    def _check_stop(self, stopping: Stopping) -> None:
        if self._ranks.any(stopping()):
            self.learner.clear()
            raise Stopped

    def _survey(self, batch: TrainBatch, cuts: list[NDArray[np.int64] | None], stopping: Stopping) -> None:
        """Pass every log-probability to the objective before the first loss."""
        with torch.no_grad():
            for which in cuts:
                self._check_stop(stopping)
                if which is not None:
                    logprobs = self._logprobs_or_quarantine(batch, which, last=False)
                    if logprobs is not None and self._has_advantages:
                        self._objective.survey(logprobs, tokens_of(batch, which, self._ranks.device))
                elif self.learner.even:
                    self._idle_pass(batch)
        self._objective.surveyed()

    def _logprobs(self, batch: TrainBatch, which: NDArray[np.int64], *, last: bool) -> Tensor:
        """Return float32 [T]: the completion tokens of some rows, in the order of ``tokens_of``."""
        forward, device, temperature = (
            partial(self._logits, last=last),
            self._ranks.device,
            self._config.rollout.temperature,
        )
        if self._shares_prompts:
            return shared_logprobs(forward, batch, which, device, temperature)
        return completion_logprobs(forward, batch, which, device, temperature, packing=self._config.trainer.packing)

    def _logits(self, *, last: bool, **inputs: Any) -> Tensor:
        logits: Tensor = self.learner.forward(last=last, use_cache=False, **inputs).logits
        return logits

    def _idle_pass(self, batch: TrainBatch) -> Tensor:
        """Run a pass over the shortest row for the model's collectives; its gradient is zero."""
        shortest = np.argsort(batch.sequence_lengths, kind="stable")[:1]
        return self._logprobs(batch, shortest, last=False).sum() * 0.0

    def _too_large(self, batch: TrainBatch, error: Exception) -> OutOfMemory:
        micro = self._config.trainer.micro_tokens
        text = self._memory_text(
            batch, "", f"trainer.micro_tokens below {micro} or trainer.gradient_checkpointing", error
        )
        # With several ranks, the others may be in a collective of this pass and cannot receive an order to save.
        alone = isinstance(self._ranks, OneRank)
        if alone:
            clear_frames(error.__traceback__)  # they reference the activations
            self.learner.clear()
        return OutOfMemory(text, can_save=alone)

    def _no_room_to_step(self, batch: TrainBatch, error: Exception) -> OutOfMemory:
        """Return the error for an optimizer that does not fit. Some weights may have moved, so nothing can be saved."""
        keys = 'trainer.backend "fsdp" or "deepspeed" over more ranks (trainer.nproc)'
        return OutOfMemory(self._memory_text(batch, " in the optimizer", keys, error), can_save=False)

    def _memory_text(self, batch: TrainBatch, within: str, keys: str, error: Exception) -> str:
        where = f" on rank {self._ranks.place.rank}" if self._ranks.place.world > 1 else ""
        return (
            f"step {batch.step}: out of memory{within}{where}; batch {batch.batch} of {len(batch.rewards)} trajectories"
            f" is kept. {new_run(keys)} ({first_line(error)})"
        )


def new_run(keys: str) -> str:
    """Return the remedy if a run cannot continue with its configured ``keys``."""
    return (
        f"A run's configuration is fixed: start a new one with {keys}, and model.path at the newest checkpoint if "
        "there is one; its optimizer starts afresh"
    )


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def not_finite(**numbers: float) -> str:
    """Return the first number that is not finite, with its name; empty if all are finite."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            return f"{name.replace('_', ' ')} is {value}"
    return ""
