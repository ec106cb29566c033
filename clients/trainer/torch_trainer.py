# pyright: basic, reportMissingImports=false
"""The train step of every torch backend: any causal language model of ``transformers``, on one rank or many.

One optimizer step a batch. The policy that the ratio refers to (old) is the one the step begins with, so its
log-probabilities are those of the forward pass that is trained, detached: one pass, no second copy of the weights.
What is minimised and measured is the ``objective``'s; how weights are held and moved is the ``learner``'s. Each rank
works on its own rows. Ranks with fewer passes than others wait at the beginning, so that the last passes of all come
together; where weights are sharded they wait in a pass that teaches nothing.
"""

import gc
import logging
import math
import time
from pathlib import Path
from traceback import clear_frames
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
from staleflow.clients.trainer.backends.files import checkpoint_gradients, load_model, save_model, save_streamed
from staleflow.clients.trainer.backends.flops import Speed
from staleflow.clients.trainer.backends.forward import completion_logprobs, keeps_apart
from staleflow.clients.trainer.backends.learner import Learner, make_learner
from staleflow.clients.trainer.backends.lr_schedule import learning_rate
from staleflow.clients.trainer.backends.packing import packs
from staleflow.clients.trainer.backends.sharded_files import WeightFiles, open_model
from staleflow.clients.trainer.backends.tensors import Streamed, to_arrays
from staleflow.clients.trainer.data.batch import TrainBatch, micro_batches, rows_of
from staleflow.clients.trainer.evaluation.held_out import Evaluation
from staleflow.clients.trainer.evaluation.sharded import accompany, lead
from staleflow.clients.trainer.quarantine import Blame
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Step, Version
from staleflow.protocols.wire.messages import ModelLimits

log = logging.getLogger(__name__)


class TorchTrainer:
    """The model of ``directory``, its optimizer, and steps on batches. Deterministic on a CPU."""

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
        self._blame = Blame(self._ranks)
        self._initial = False
        self._has_advantages = False
        """For every row of the part that is trained; without them its passes teach nothing."""
        self._seconds = 0.0
        """That the step under way has computed for."""
        self.load(None)
        if config.trainer.packing:
            self._check_packing()

    @property
    def model(self) -> Any:
        """Without what a backend wraps round it."""
        return self.learner.model

    @property
    def limits(self) -> ModelLimits:
        """What the model can read."""
        config = self.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None) or 0
        return ModelLimits(vocabulary=config.vocab_size, context=context)

    def check(self, directory: Path) -> None:
        """``ConfigError`` when another backend wrote this checkpoint, or another number of ranks."""
        self.learner.check(directory)

    def load(self, directory: Path | None) -> None:
        """The state of a checkpoint, or of the initial model (None). Every rank does."""
        if directory is None and self._initial:
            return
        if hasattr(self, "learner"):
            self._let_go()
        model, files = self._open(directory or self._directory)
        if self._config.trainer.gradient_checkpointing:
            checkpoint_gradients(model)
        self._speed = Speed(model, self._ranks, self._config.model.dtype)
        self.learner = make_learner(self._config, model, self._ranks, files)
        self._initial = directory is None
        if directory is not None:
            self.learner.load(directory)

    def save(self, directory: Path) -> None:
        """Model and tokenizer as ``from_pretrained`` opens them; optimizer and random state beside them. Every rank
        puts its part there."""
        learner, leads = self.learner, self._ranks.place.leads
        if not learner.whole:
            tensors = learner.tensors()
            if leads:
                dtype = self._config.model.dtype
                save_streamed(learner.model, tensors, directory, dtype=dtype, tokenizer_of=self._directory)
            for _ in tensors:
                pass  # the others take part in gathering
        elif leads:
            save_model(learner.model, directory, tokenizer_of=self._directory)
        learner.save(directory)

    def weights(self) -> Published:
        """Views on the model's tensors (on a CPU), or gathered one by one with the other ranks; tied ones once."""
        if self.learner.whole:
            return to_arrays(self.learner.model.state_dict())
        return Streamed(self.learner.tensors)

    def gather(self) -> None:
        """This rank's part in a pass over ``weights`` on rank 0."""
        for _ in self.learner.tensors():
            pass

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        """One optimizer step over all passes of all ranks; a loss or gradient that is not finite leaves all as it was,
        and so does a batch without a trained token.

        The values are those of the whole batch. ``OutOfMemory`` when a pass or the optimizer does not fit;
        ``Untrainable`` when groups make it raise, on every rank.
        """
        self._objective.begin()
        self._seconds = 0.0
        self.add(batch, stopping, last=True)
        return self.finish(batch, step)

    def begin(self) -> None:
        """A step in parts begins, or begins again: nothing of its gradient is there."""
        self._objective.begin()
        self._seconds = 0.0
        self.learner.clear()

    def add(self, part: TrainBatch, stopping: Stopping, *, last: bool) -> None:
        """Add the gradient of whole groups of the batch; ``last``: they complete it. Raises as ``train``."""
        self._initial, began = False, time.monotonic()
        self._blame.clear()
        if self._config.trainer.mask_truncated:
            part.mask_cut()
        try:
            self._add(part, stopping, last=last)
            self._blame.settle(part)
        except Untrainable:
            self.learner.clear()
            raise
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise self._too_large(part, error) from error
            raise
        self._seconds += time.monotonic() - began

    def finish(self, batch: TrainBatch, step: Step) -> StepResult:
        """Move the weights, as ``train`` does; ``batch``: every part that was added."""
        began, scale = time.monotonic(), self._objective.scale()
        values = batch_values(batch, self._ranks.gather) | self._objective.values()
        learns = values["trainer/tokens"] > 0  # on any rank; AdamW moves the weights for a gradient of zero too
        try:
            norm = self.learner.step(step, scale=scale, take=learns and math.isfinite(values["loss"]))
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise self._no_room_to_step(batch, error) from error
            raise
        values["grad_norm"] = norm
        values |= self._speed.values(batch, self._seconds + time.monotonic() - began)
        if bad := not_finite(loss=values["loss"], gradient_norm=norm):
            return StepResult(values=values, bad=bad)
        if not learns:
            if self._ranks.place.leads:
                log.warning("step %d: its batch has no token to train; it is consumed, the weights stay", step)
            return StepResult(values=values)
        values["lr"] = learning_rate(self._config.trainer, step)
        return StepResult(values=values)

    def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
        """Mean reward on the held-out prompts, with this model, from rank 0; a sharded one needs every rank for it.

        ``OutOfMemory`` when the engine's passes do not fit.
        """
        if self._evaluation is None:
            return {}
        try:
            return self._evaluate(self._evaluation, version, stopping)
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                rows, reason = self._config.rollout.max_inflight, first_line(error)
                what = f"version {version}: out of memory while it answers the held-out prompts"
                text = f"{what}. {new_run(f'rollout.max_inflight below {rows}')} ({reason})"
                # a whole model answers on rank 0 alone, while the others wait for orders
                raise OutOfMemory(text, can_save=self.learner.whole) from error
            raise

    def close(self) -> None:
        """Nothing is held."""

    @property
    def together(self) -> bool:
        """True when weights and evaluation need every rank."""
        return not self.learner.whole

    def _let_go(self) -> None:
        """Of the model, before there is another: two need not fit. What shards one is in circles of references."""
        self.learner.close()
        del self.learner, self._speed
        gc.collect()

    def _open(self, directory: Path) -> tuple[Any, WeightFiles | None]:
        """The model; without its weights, and where they are, for a backend that shards them."""
        trainer, dtype, device = self._config.trainer, self._config.model.dtype, self._ranks.device
        if trainer.backend == "fsdp":  # its shards are the float32 masters, each moved by itself
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
            self._go_on(stopping)
            closes = last and number == len(cuts) - 1
            if which is not None:
                logprobs = self._logprobs_or_blame(batch, which, last=closes)
                if logprobs is not None:
                    self.learner.backward(self._loss(batch, which, logprobs), last=closes)
            elif self.learner.even:
                self.learner.backward(self._idle(batch), last=closes)

    def _take(self, batch: TrainBatch) -> None:
        """Advantages of the rows. A group whose own raise is noted: the step is void then."""
        objective, self._has_advantages = self._objective, False
        try:
            objective.take(batch)
            self._has_advantages = True
        except Exception as error:
            if not objective.by_group:
                raise
            everything = np.arange(len(batch.rewards))
            self._blame.find(batch, everything, error, lambda rows: objective.take(rows_of(batch, rows)))

    def _logprobs_or_blame(self, batch: TrainBatch, which: NDArray[np.int64], *, last: bool) -> Tensor | None:
        """As ``_logprobs``; None where a group makes the pass raise. Ranks that compute together cannot try a group
        alone, so there the error ends the process."""
        try:
            return self._logprobs(batch, which, last=last)
        except Exception as error:
            if not isinstance(self._ranks, OneRank):
                raise
            self._blame.find(batch, which, error, lambda rows: self._logprobs(batch, rows, last=False))
            return None

    def _loss(self, batch: TrainBatch, which: NDArray[np.int64], logprobs: Tensor) -> Tensor:
        """Loss of one pass; 0 where a group makes it raise, so that every rank comes to the end of its passes."""
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
            self._blame.find(batch, which, error, alone)
            return nothing

    def _passes(self, batch: TrainBatch) -> list[NDArray[np.int64] | None]:
        """Rows of each pass; None, at the beginning, where another rank has more."""
        trainer, lengths = self._config.trainer, batch.sequence_lengths
        cuts = (packs if trainer.packing else micro_batches)(lengths, trainer.micro_tokens)
        most = int(self._ranks.max(torch.tensor([len(cuts)]))[0])
        return [*[None] * (most - len(cuts)), *cuts]

    def _check_packing(self) -> None:
        """``ConfigError`` for an architecture that mixes the trajectories of a packed pass. Every rank does."""

        def forward(**inputs: Tensor) -> Tensor:
            logits: Tensor = self.learner.forward(last=False, use_cache=False, **inputs).logits
            return logits

        def backward(loss: Tensor) -> None:
            self.learner.backward(loss, last=False)

        apart = keeps_apart(forward, backward, self.model.get_input_embeddings(), self._ranks.device)
        self.learner.clear()
        if not apart:
            raise ConfigError("trainer.packing", True, "this model does not keep packed trajectories apart: false")

    def _go_on(self, stopping: Stopping) -> None:
        if self._ranks.any(stopping()):
            self.learner.clear()
            raise Stopped

    def _survey(self, batch: TrainBatch, cuts: list[NDArray[np.int64] | None], stopping: Stopping) -> None:
        """Show the objective every log-probability before the first loss."""
        with torch.no_grad():
            for which in cuts:
                self._go_on(stopping)
                if which is not None:
                    logprobs = self._logprobs_or_blame(batch, which, last=False)
                    if logprobs is not None and self._has_advantages:
                        self._objective.survey(logprobs, tokens_of(batch, which, self._ranks.device))
                elif self.learner.even:
                    self._idle(batch)
        self._objective.surveyed()

    def _logprobs(self, batch: TrainBatch, which: NDArray[np.int64], *, last: bool) -> Tensor:
        """float32 [T]: of the completion tokens of some rows, in the order of ``tokens_of``."""
        trainer, temperature = self._config.trainer, self._config.rollout.temperature

        def forward(**inputs: Tensor) -> Tensor:
            logits: Tensor = self.learner.forward(last=last, use_cache=False, **inputs).logits
            return logits

        return completion_logprobs(forward, batch, which, self._ranks.device, temperature, packing=trainer.packing)

    def _idle(self, batch: TrainBatch) -> Tensor:
        """A pass over the shortest row: the model's collectives, and a gradient of zero."""
        shortest = np.argsort(batch.sequence_lengths, kind="stable")[:1]
        return self._logprobs(batch, shortest, last=False).sum() * 0.0

    def _too_large(self, batch: TrainBatch, error: Exception) -> OutOfMemory:
        micro = self._config.trainer.micro_tokens
        text = self._kept(batch, "", f"trainer.micro_tokens below {micro} or trainer.gradient_checkpointing", error)
        # of several ranks the others may be in a collective of this pass, where they hear no order to save
        alone = isinstance(self._ranks, OneRank)
        if alone:
            clear_frames(error.__traceback__)  # they hold the activations
            self.learner.clear()
        return OutOfMemory(text, can_save=alone)

    def _no_room_to_step(self, batch: TrainBatch, error: Exception) -> OutOfMemory:
        """Some weights may have moved and others not: there is nothing to save."""
        keys = 'trainer.backend "fsdp" or "deepspeed" over more ranks (trainer.nproc)'
        return OutOfMemory(self._kept(batch, " in the optimizer", keys, error), can_save=False)

    def _kept(self, batch: TrainBatch, within: str, keys: str, error: Exception) -> str:
        where = f" on rank {self._ranks.place.rank}" if self._ranks.place.world > 1 else ""
        return (
            f"step {batch.step}: out of memory{within}{where}; batch {batch.batch} of {len(batch.rewards)} trajectories"
            f" is kept. {new_run(keys)} ({first_line(error)})"
        )


def new_run(keys: str) -> str:
    """What helps where a run cannot go on with what its configuration says of ``keys``."""
    return (
        f"A run's configuration is fixed: begin a new one with {keys}, and model.path at the newest checkpoint if "
        "there is one; its optimizer starts afresh"
    )


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def not_finite(**numbers: float) -> str:
    """Names the first number that is not finite, with its value; empty when all are."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            return f"{name.replace('_', ' ')} is {value}"
    return ""
