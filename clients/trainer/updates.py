# pyright: basic, reportMissingImports=false
"""Several optimizer updates in one train step: ``trainer.epochs`` passes over a batch, in ``trainer.minibatches`` each.

The old policy is the model at the start of the step. Its log-probabilities come from one pass without gradient over the
whole batch, as do the advantages, M2PO's cutoff, and a first call of the loss, which finds the groups that it cannot
handle before any weight has moved. Each update then uses some whole groups, and averages its loss over their tokens.

A step takes all of its updates or none: one batch is one version. Weights and optimizer are copied to main memory
before the first update and restored if an update's loss or gradient is not finite, a stop is requested, a group makes
an update raise, or memory runs out. Without the copy, a stopped or repeated step would train some groups twice.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.out_of_memory import out_of_memory
from staleflow.clients.trainer.algorithms.objective import Objective
from staleflow.clients.trainer.backends.base import OutOfMemory, StepResult, Stopped, Stopping, Untrainable, not_finite
from staleflow.clients.trainer.backends.collectives import ManyRanks, OneRank
from staleflow.clients.trainer.backends.learner import Learner
from staleflow.clients.trainer.backends.lr_schedule import learning_rate
from staleflow.clients.trainer.backends.snapshot import Snapshot
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.mini_batches import BatchGroups, mini_batches
from staleflow.clients.trainer.gradients import Gradients, PassOutOfMemory
from staleflow.clients.trainer.quarantine import GroupQuarantine
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Step


@dataclass(frozen=True, slots=True)
class _Update:
    rows: NDArray[np.int64]
    """This rank's rows, possibly none."""
    tokens: int
    """Trained tokens of all ranks."""


class Updates:
    """Take the updates of one step. Every rank takes part in each, even without rows."""

    def __init__(
        self,
        config: Config,
        *,
        learner: Learner,
        gradients: Gradients,
        objective: Objective,
        quarantine: GroupQuarantine,
        ranks: OneRank | ManyRanks,
        before_update: Callable[[], None],
        no_room_to_copy: Callable[[TrainBatch, Exception], OutOfMemory],
        no_room_to_step: Callable[[TrainBatch, Exception], OutOfMemory],
    ) -> None:
        """``before_update``: called before each change of the weights. The last two make the errors for a snapshot and
        for an optimizer that do not fit."""
        self._config = config
        self._learner = learner
        self._gradients = gradients
        self._objective = objective
        self._quarantine = quarantine
        self._ranks = ranks
        self._before_update = before_update
        self._no_room_to_copy = no_room_to_copy
        self._no_room_to_step = no_room_to_step

    def take(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        """Take all updates and return their metrics, or take none and raise or return ``bad``. Raises as ``train``."""
        self._start(batch, stopping)
        self._quarantine.raise_if_any(batch)
        # ``restore`` needs no ``before_update``: before the first update it changes no byte, and later none is read.
        snapshot = self._snapshot(batch)
        try:
            return self._take(batch, step, stopping, snapshot)
        except (Stopped, Untrainable, OutOfMemory, PassOutOfMemory):
            snapshot.restore()
            raise
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                snapshot.restore()
            raise

    def _start(self, batch: TrainBatch, stopping: Stopping) -> None:
        """Compute all values that the updates share: advantages, old log-probabilities and M2PO's cutoff."""
        gradients, objective = self._gradients, self._objective
        passes, lengths = gradients.passes(batch), batch.completion_lengths
        firsts = lengths.cumsum() - lengths
        old = torch.zeros(int(lengths.sum()), device=self._ranks.device)

        def visit(which: NDArray[np.int64], logprobs: Tensor) -> None:
            places = np.concatenate([np.arange(firsts[row], firsts[row] + lengths[row]) for row in which])
            old[torch.from_numpy(places).to(old.device)] = logprobs
            if objective.surveys:
                gradients.survey_pass(batch, which, logprobs)
            gradients.loss(batch, which, logprobs)

        gradients.take(batch)
        gradients.scan(batch, passes, stopping, visit)
        if objective.surveys:
            objective.surveyed()
        objective.remember(old)

    def _take(self, batch: TrainBatch, step: Step, stopping: Stopping, snapshot: Snapshot) -> StepResult:
        updates, taken, bad = [*self._plan(batch, step)], list[dict[str, float]](), ""
        for number, update in enumerate(updates, 1):
            values = self._update(batch, update, step, stopping)
            if update.tokens:
                taken.append(values)
            if bad := not_finite(loss=values["loss"], gradient_norm=values["grad_norm"]):
                snapshot.restore()
                bad += f" in update {number} of {len(updates)}"
                break
        means = {name: fmean(each[name] for each in taken) for name in (taken[0] if taken else ())}
        norms = [values["grad_norm"] for values in taken]
        if bad:
            means.pop("lr", None)
        counts = {"trainer/updates": float(0 if bad else len(taken)), "grad_norm/max": max(norms, default=0.0)}
        return StepResult(values={"grad_norm": 0.0} | self._objective.values() | means | counts, bad=bad)

    def _snapshot(self, batch: TrainBatch) -> Snapshot:
        try:
            return self._learner.snapshot()
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise self._no_room_to_copy(batch, error) from error
            raise

    def _update(self, batch: TrainBatch, update: _Update, step: Step, stopping: Stopping) -> dict[str, float]:
        """Take one update, unless it has no trained token or is not finite; return its metrics over all ranks."""
        objective, learner = self._objective, self._learner
        objective.start_update(batch, update.rows)
        self._gradients.add(batch, self._gradients.passes(batch, update.rows), stopping, last=True)
        try:
            self._quarantine.raise_if_any(batch)
        except Untrainable:
            learner.clear()
            raise
        scale = objective.scale()
        values, lr_factor = objective.update_values(), objective.lr_factor()
        moves = update.tokens > 0 and step >= self._config.trainer.critic_warmup
        if moves:
            self._before_update()
        try:
            norm = learner.step(step, scale=scale, take=moves and math.isfinite(values["loss"]), lr_factor=lr_factor)
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise self._no_room_to_step(batch, error) from error
            raise
        return values | {"grad_norm": norm, "lr": learning_rate(self._config.trainer, step) * lr_factor}

    def _plan(self, batch: TrainBatch, step: Step) -> Iterator[_Update]:
        trainer, groups = self._config.trainer, self._groups(batch)
        for epoch in range(trainer.epochs):
            for chosen in mini_batches(groups, trainer.minibatches, seed=self._config.seed, step=step, epoch=epoch):
                rows = np.flatnonzero(np.isin(batch.group_ids, groups.ids[chosen]))
                yield _Update(rows, int(groups.tokens[chosen].sum()))

    def _groups(self, batch: TrainBatch) -> BatchGroups:
        """Return the groups of the batch on all ranks, by ascending id."""
        tokens = batch.loss_mask.sum(axis=1)
        own = np.stack([batch.group_ids, np.full_like(batch.group_ids, self._ranks.place.rank), tokens], axis=1)
        of_rows, ranks, counts = self._ranks.gather(own).T
        ids, first, index = np.unique(of_rows, return_index=True, return_inverse=True)
        return BatchGroups(ids=ids, ranks=ranks[first], tokens=np.bincount(index, counts).astype(np.int64))
