# pyright: basic, reportMissingImports=false
"""Passes of a trainer's model over rows of a batch: padded, packed, or with the prompt of a group computed once."""

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.models.passes import computed, packed_passes, padded_passes, shared_passes
from staleflow.clients.trainer.algorithms.objective import Reduce
from staleflow.clients.trainer.algorithms.router import RouterLoss
from staleflow.clients.trainer.backends.activation_offload import activations_in_main_memory
from staleflow.clients.trainer.backends.attention import Attention
from staleflow.clients.trainer.backends.collectives import ManyRanks, OneRank
from staleflow.clients.trainer.backends.compilation import CompiledLayers
from staleflow.clients.trainer.backends.flops import FlopsMeter
from staleflow.clients.trainer.backends.forward import completion_logprobs, ignores_padding, isolates_packed_rows
from staleflow.clients.trainer.backends.learner import Learner
from staleflow.clients.trainer.backends.output_layer import OutputLayer
from staleflow.clients.trainer.backends.prompt_attention import sharing_attention
from staleflow.clients.trainer.backends.prompt_layout import shared_prefixes
from staleflow.clients.trainer.backends.router_replay import (
    UNSHARED_TOKENS,
    RouterReplay,
    flat,
    packed_records,
    padded_records,
)
from staleflow.clients.trainer.backends.shared_prompts import shared_logprobs, why_not_shared
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.protocols.wire.routed_experts import NAME as ROUTED_EXPERTS

log = logging.getLogger(__name__)

RowIds = NDArray[np.int64]
FORWARD_SHARE = 1 / 3
"""Computation of a pass without gradient, as a share of one with it."""


class ModelPasses:
    """The passes of every model that the trainer loads, one after the other.

    For each model: ``apply`` before a backend wraps it, then ``use``. ``check`` once, with the first model.
    """

    def __init__(self, config: Config, ranks: OneRank | ManyRanks) -> None:
        self._config = config.trainer
        self._ranks = ranks
        self._attention = Attention(config, ranks.device)
        self.compiled = CompiledLayers(config.trainer.compile, ranks.device)
        self.replay = RouterReplay(config.trainer.router_replay, ranks.device)
        self._output = OutputLayer(config.trainer.logit_chunk, config.rollout.temperature)
        replaceable = config.trainer.attention in ("auto", "sdpa")
        self._shares_prompts = config.trainer.share_prompts and config.rollout.group_size > 1 and replaceable
        self._mask_padding = True
        self.micro_tokens = config.trainer.micro_tokens
        """Maximum tokens of a pass: the configured number, or half of it since a pass did not fit."""

    def apply(self, model: Any) -> None:
        """Set attention, routers and output layer of a loaded model, and compile its layers.

        ``ConfigError`` if it does not support the attention, or has no router to replay.
        """
        self._attention.apply(model)
        self.replay.apply(model)
        self.compiled.apply(model)
        self._output.apply(model)

    def use(self, learner: Learner, flops: FlopsMeter) -> None:
        """Compute with this learner's model from now on."""
        self._learner = learner
        self._flops = flops
        self.router = RouterLoss(self._config.router_aux_coef, learner.model.config, self._ranks.device)

    def release(self) -> None:
        """Hold no model until the next ``use``."""
        self.replay.release()
        del self._learner, self._flops, self.router

    def check(self) -> None:
        """Choose the kind of passes by what the model computes. Call it on every rank.

        ``ConfigError`` for a model that mixes the trajectories of a packed pass, or whose routers do not replay.
        """
        forward = partial(self._logits, last=False)
        self.replay.check(self._learner.model, forward)
        with self.compiled.paused():
            self._choose()
        with self.computing():
            self.compiled.check(self._learner.model, forward, self._backward, self._ranks.device, self._ranks.any)
        self._learner.clear()

    def _choose(self) -> None:
        forward = partial(self._logits, last=False)
        self._output.check(self._learner.model, forward, self._ranks.device, self._ranks.any)
        if self._shares_prompts:
            reason = why_not_shared(self._learner.model, forward, self._backward, self._ranks.device)
            self._learner.clear()
            if reason:
                log.info("this model computes the prompt of a group once for each sample: %s", reason)
            self._shares_prompts = not self._ranks.any(bool(reason))
        if self._shares_prompts:
            return
        if self._config.packing:
            self._check_packing()
        elif not self._passes_check(ignores_padding):
            log.info("padded passes use an attention mask, since this model's output depends on padding")
        else:
            self._mask_padding = bool(self.router.inputs)  # the auxiliary loss must not count padding

    def assume(self, *, shares_prompts: bool, whole_logits: bool) -> bool:
        """Choose the kind of passes in place of ``check``, for a model without values. Return if it shares prompts."""
        self._mask_padding = False
        self._shares_prompts = self._shares_prompts and shares_prompts
        if whole_logits:
            self._output.keep_whole()
        return self._shares_prompts

    def plan(self, batch: TrainBatch, rows: RowIds) -> list[RowIds]:
        """Divide some rows into passes of at most ``micro_tokens``; a longer row forms its own."""
        lengths, groups, size = batch.sequence_lengths[rows], batch.group_ids[rows], self.micro_tokens
        if self._shares_prompts:
            cuts = shared_passes(lengths, self._shared(batch, rows), groups, size)
        else:
            cuts = (packed_passes if self._config.packing else padded_passes)(lengths, size)
        return [rows[cut] for cut in cuts]

    def halve(self) -> bool:
        """Halve ``micro_tokens`` for good. Return False, without effect, if that is impossible or was done before."""
        if self.micro_tokens < max(2, self._config.micro_tokens):
            return False
        self.micro_tokens //= 2
        return True

    def size(self, batch: TrainBatch, rows: RowIds) -> int:
        """Return the number of tokens that a pass computes, padding included."""
        lengths = batch.sequence_lengths[rows]
        if self._shares_prompts or self._config.packing:
            return computed(lengths, self._shared(batch, rows), batch.group_ids[rows])[0]
        return len(lengths) * int(lengths.max())

    @contextmanager
    def computing(self) -> Generator[None]:
        """Return the context in which passes, backward passes included, are computed."""
        with sharing_attention(self._learner.model) if self._shares_prompts else nullcontext():
            try:
                yield
            finally:
                self.replay.stop()

    def begin(self) -> None:
        """Reset the metrics for a new step."""
        self.router.begin()
        self.replay.begin()

    def values(self, reduce: Reduce) -> dict[str, float]:
        """Return the metrics of the step's passes, over all ranks."""
        return self.router.values(reduce) | self.replay.values(reduce)

    def logprobs(self, batch: TrainBatch, which: RowIds, *, last: bool, entropy: bool = False) -> Tensor:
        """Return float32 [T]: the completion tokens of some rows, in the order of ``tokens_of``. Within ``computing``.

        ``entropy``: return [T, 2] instead, log-probabilities and entropies. ``last``: as in ``Learner.forward``.
        """
        self._count(batch, which)
        score = self._output.score(partial(self._logits, last=last), entropy=entropy)
        replay = self.replay if self.replay.wanted and ROUTED_EXPERTS in batch.token_columns else None
        if self._shares_prompts:
            return shared_logprobs(score, batch, which, self._ranks.device, replay=replay)
        if replay is not None:
            packing = self._config.packing
            replay.start(packed_records(batch, which) if packing else flat(padded_records(batch, which)))
        return completion_logprobs(
            score,
            batch,
            which,
            self._ranks.device,
            packing=self._config.packing,
            mask_padding=self._mask_padding,
            boundaries=self._attention.takes_boundaries(self._learner.model),
        )

    def _logits(self, *, last: bool, **inputs: Any) -> Tensor:
        with self._saving():
            output = self._learner.forward(last=last, use_cache=False, **self.router.inputs, **inputs)
        self.router.keep(output)
        logits: Tensor = output.logits
        return logits

    def _saving(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass that decides where its activations are kept."""
        device = self._ranks.device
        if self._config.offload_activations and device.type == "cuda" and torch.is_grad_enabled():
            return activations_in_main_memory(self._learner.model, device)
        return nullcontext()

    def _backward(self, loss: Tensor) -> None:
        self._learner.backward(loss, last=False)

    def _passes_check(self, check: Callable[..., bool], **more: bool) -> bool:
        embeddings = self._learner.model.get_input_embeddings()
        passed = check(partial(self._logits, last=False), self._backward, embeddings, self._ranks.device, **more)
        self._learner.clear()
        return passed

    def _check_packing(self) -> None:
        model = self._learner.model
        while not self._passes_check(isolates_packed_rows, boundaries=self._attention.takes_boundaries(model)):
            if not self._attention.fall_back(model):
                raise ConfigError("trainer.packing", True, "this model mixes packed trajectories; set it to false")

    def _shared(self, batch: TrainBatch, rows: RowIds) -> RowIds:
        """Return the number of leading tokens that each row computes together with others of its group."""
        if not self._shares_prompts:
            return np.zeros(len(rows), np.int64)
        prompts = batch.sequence_lengths[rows] - batch.completion_lengths[rows]
        prompts -= UNSHARED_TOKENS * self.replay.wanted
        return shared_prefixes(batch.input_ids[rows], prompts, batch.group_ids[rows])

    def _count(self, batch: TrainBatch, which: RowIds) -> None:
        if not self._flops.measures:
            return
        shared = self._shared(batch, which)
        tokens, squares = computed(batch.sequence_lengths[which], shared, batch.group_ids[which])
        logits = int(batch.completion_lengths[which].sum())
        share = 1.0 if torch.is_grad_enabled() else FORWARD_SHARE
        self._flops.count(tokens=tokens, squares=squares, logits=logits, share=share)
