# pyright: basic, reportMissingImports=false
"""Forward and backward passes over the rows of a batch, on one rank of any torch backend.

Each rank processes its own rows, after an exchange that balances their tokens. Ranks with fewer passes than others idle
at the beginning, so that the last passes of all run together; with sharded weights they run passes without effect
instead, as does a rank without any pass in the last one.
"""

from collections.abc import Callable, Sequence
from traceback import clear_frames

import numpy as np
import torch
from torch import Tensor

from staleflow.clients.out_of_memory import first_line, out_of_memory
from staleflow.clients.trainer.algorithms.objective import Objective, tokens_of
from staleflow.clients.trainer.backends.base import Stopped, Stopping
from staleflow.clients.trainer.backends.collectives import ManyRanks, OneRank
from staleflow.clients.trainer.backends.learner import Learner
from staleflow.clients.trainer.data.batch import TrainBatch, rows_of
from staleflow.clients.trainer.data.exchange import exchanged
from staleflow.clients.trainer.model_passes import ModelPasses, RowIds
from staleflow.clients.trainer.quarantine import GroupQuarantine
from staleflow.configs.schema import Config

Passes = Sequence[RowIds | None]
"""The rows of each pass; None for a pass that only another rank has."""
Visit = Callable[[RowIds, Tensor], None]
"""Receive the rows of a pass and their log-probabilities, float32 [T] without gradient."""


_CONTINUE, _STOP, _NO_ROOM = range(3)
"""What a rank reports to the others between two passes; the highest number applies to all."""


class PassOutOfMemory(Exception):
    """A pass of some rank did not fit. Every rank raises it between the same two passes, and has no gradient left."""


class Gradients:
    """Passes of one model. Groups that make one raise are recorded in ``quarantine``, which voids the step."""

    def __init__(
        self,
        config: Config,
        *,
        learner: Learner,
        objective: Objective,
        quarantine: GroupQuarantine,
        ranks: OneRank | ManyRanks,
        passes: ModelPasses,
    ) -> None:
        self._config = config
        self._learner = learner
        self._objective = objective
        self._quarantine = quarantine
        self._ranks = ranks
        self._passes = passes
        self._wants_entropy = config.trainer.algorithm.entropy_coef > 0
        self._has_advantages = False
        """True if all rows of the current part have advantages; otherwise its passes have no effect."""
        self._no_room = ""
        """The error of a pass of this rank that did not fit, until the ranks agree on it."""
        self._largest = 0
        """Tokens of the largest pass that fitted so far, of one of several ranks."""

    def take(self, batch: TrainBatch) -> None:
        """Compute the advantages of the rows. Groups that raise are recorded."""
        objective, self._has_advantages = self._objective, False
        try:
            objective.take(batch)
            self._has_advantages = True
        except Exception as error:
            if not objective.by_group:
                raise
            everything = np.arange(len(batch.rewards))
            self._quarantine.record(batch, everything, error, lambda rows: objective.take(rows_of(batch, rows)))

    def balance(self, batch: TrainBatch) -> TrainBatch:
        """Return the rows that this rank trains, after ``take``: its own, or others if that balances the ranks.

        Every rank must call it. A step without all advantages is void, so that nothing moves.
        """
        objective, ranks = self._objective, self._ranks
        if ranks.place.world == 1 or ranks.any(not self._has_advantages):
            return batch
        moved = exchanged(batch, objective.advantages.cpu().numpy(), ranks)
        if moved is None:
            return batch
        rows, advantages = moved
        objective.replace_rows(rows.completion_lengths, torch.from_numpy(advantages))
        return rows

    def passes(self, batch: TrainBatch, rows: RowIds | None = None) -> Passes:
        """Divide some rows (all if None) into passes, starting with None for each pass that only another rank has."""
        cuts = self._passes.plan(batch, np.arange(len(batch.rewards)) if rows is None else rows)
        most = int(self._ranks.max(torch.tensor([len(cuts)]))[0])
        return [*[None] * (most - len(cuts)), *cuts]

    def add(self, batch: TrainBatch, passes: Passes, stopping: Stopping, *, last: bool) -> None:
        """Add the gradient of the passes; ``last``: they are the last before an update. ``Stopped`` on a request.

        ``PassOutOfMemory`` if a pass does not fit while no rank waits for this one. Ranks with sharded weights wait in
        each pass, and raise the error itself. Replicas wait in the last pass only, where they sum the gradients. If it
        is larger than all passes that fitted, a pass without effect follows it and computes the sum.
        """
        for number, which in enumerate(passes):
            self._agree(stopping)
            closes = last and number == len(passes) - 1
            apart = closes and self._is_unproven(batch, which)
            if which is not None:
                self._attempt(batch, which, last=closes and not apart)
            elif not apart and (self._learner.even or closes):
                self._idle_backward(batch, last=closes)
            if apart:
                self._agree()
                self._idle_backward(batch, last=True)
        self._agree()

    def scan(self, batch: TrainBatch, passes: Passes, stopping: Stopping, visit: Visit) -> None:
        """Visit the log-probabilities of every pass, without gradient. Raise as ``add``."""
        with torch.no_grad():
            for which in passes:
                self._agree(stopping)
                if which is not None:
                    self._guarded(lambda which=which: self._visit(batch, which, visit), last=False)  # type: ignore[misc]
                elif self._learner.even:
                    self._idle_pass(batch, last=False)
            self._agree()

    def survey(self, batch: TrainBatch, passes: Passes, stopping: Stopping) -> None:
        """Pass every log-probability to the objective before the first loss."""
        self.scan(batch, passes, stopping, lambda which, logprobs: self.survey_pass(batch, which, logprobs))
        self._objective.surveyed()

    def survey_pass(self, batch: TrainBatch, which: RowIds, logprobs: Tensor) -> None:
        """Pass the log-probabilities of one pass to the survey of the objective."""
        self._objective.survey(logprobs, tokens_of(batch, which, self._ranks.device))

    def loss(self, batch: TrainBatch, which: RowIds, scored: Tensor) -> Tensor:
        """Return the loss of one pass; 0 if a group makes it raise, so that every rank finishes its passes.

        ``scored``: log-probabilities [T], or [T, 2] with entropies; without them the entropy counts as 0.
        """
        objective, device = self._objective, self._ranks.device
        nothing = scored.sum() * 0.0
        if not self._has_advantages:
            return nothing

        def loss(scored: Tensor, rows: RowIds) -> Tensor:
            logprobs, entropy = scored.unbind(-1) if scored.dim() == 2 else (scored, torch.zeros_like(scored))
            return objective.loss(logprobs, tokens_of(batch, rows, device), entropy)

        def alone(rows: RowIds) -> None:
            of_rows = np.isin(np.repeat(which, batch.completion_lengths[which]), rows)
            loss(scored.detach()[torch.from_numpy(of_rows).to(device)], rows)

        try:
            return loss(scored, which)
        except Exception as error:
            self._quarantine.record(batch, which, error, alone)
            return nothing

    def _logprobs_or_quarantine(
        self, batch: TrainBatch, which: RowIds, *, last: bool, entropy: bool = False
    ) -> Tensor | None:
        """Return ``ModelPasses.logprobs``, or None if a group makes the pass raise.

        Ranks that compute together cannot test a group alone, so with several ranks the error ends the process.
        """
        try:
            return self._passes.logprobs(batch, which, last=last, entropy=entropy)
        except Exception as error:
            if not isinstance(self._ranks, OneRank):
                raise
            self._quarantine.record(batch, which, error, lambda rows: self._passes.logprobs(batch, rows, last=False))
            return None

    def _idle_pass(self, batch: TrainBatch, *, last: bool) -> Tensor:
        """Run a pass over the shortest row for the model's collectives; its gradient is zero."""
        shortest = np.argsort(batch.sequence_lengths, kind="stable")[:1]
        return self._passes.logprobs(batch, shortest, last=last).sum() * 0.0

    def _idle_backward(self, batch: TrainBatch, *, last: bool) -> None:
        self._learner.backward(self._idle_pass(batch, last=last), last=last)

    def _visit(self, batch: TrainBatch, which: RowIds, visit: Visit) -> None:
        logprobs = self._logprobs_or_quarantine(batch, which, last=False)
        if logprobs is not None and self._has_advantages:
            visit(which, logprobs)

    def _attempt(self, batch: TrainBatch, which: RowIds, *, last: bool) -> None:
        """Add the gradient of one pass."""

        def compute() -> None:
            scored = self._logprobs_or_quarantine(batch, which, last=last, entropy=self._wants_entropy)
            if scored is not None:
                weight = self._objective.pass_weight(batch, which)
                loss = self._passes.router.add(self.loss(batch, which, scored), weight)
                self._learner.backward(loss, last=last)

        if self._guarded(compute, last=last) and not isinstance(self._ranks, OneRank):
            self._largest = max(self._largest, self._passes.size(batch, which))

    def _guarded(self, compute: Callable[[], None], *, last: bool) -> bool:
        """Run a pass and return whether it fitted; keep the error for ``_agree`` if no rank waits for this one."""
        try:
            compute()
        except (MemoryError, RuntimeError) as error:
            waits = self._learner.even or (last and not isinstance(self._ranks, OneRank))
            if waits or not out_of_memory(error):
                raise
            clear_frames(error.__traceback__)  # they reference the activations
            self._no_room = first_line(error) or type(error).__name__
            return False
        return True

    def _is_unproven(self, batch: TrainBatch, which: RowIds | None) -> bool:
        """Return whether the last pass of any rank may not fit, as far as its earlier passes show."""
        if isinstance(self._ranks, OneRank) or self._learner.even:
            return False
        return self._ranks.any(which is not None and self._passes.size(batch, which) > self._largest)

    def _agree(self, stopping: Stopping = lambda: False) -> None:
        """Raise on every rank: ``PassOutOfMemory`` if a pass of any did not fit, ``Stopped`` on a request."""
        report = _NO_ROOM if self._no_room else _STOP if stopping() else _CONTINUE
        agreed = int(self._ranks.max(torch.tensor([report]))[0])
        if agreed == _CONTINUE:
            return
        self._learner.clear()
        if agreed == _STOP:
            raise Stopped
        reason, self._no_room = self._no_room, ""
        raise PassOutOfMemory(reason or "on another rank, see its log")
