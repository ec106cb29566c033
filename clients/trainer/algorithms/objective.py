# pyright: basic, reportMissingImports=false
"""The objective of one train step, on any backend: advantages, loss and metrics of the configured algorithm.

A backend calls ``begin``, ``take`` with its rank's rows, ``loss`` once per forward pass, and ``scale`` and ``values``
at the end. The backend owns the model, the gradient and the ranks. Rows may arrive in parts, each taken before its own
passes: no pass depends on later rows, except through ``scale``, which is determined last. If ``surveys`` is true, all
rows arrive at once and every pass is first given to ``survey`` without gradient, as that algorithm selects its training
tokens by all log-probabilities of the batch. ``take``, ``surveyed``, ``scale`` and ``values`` communicate with the
other ranks and must be called equally often on every rank; ``survey`` and ``loss`` do not communicate.

For a step of several updates, all rows are taken at once. ``remember`` sets the log-probabilities of the start of the
step. Each update begins with ``start_update`` and ends with ``scale`` and ``update_values``; ``values`` comes last.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.clients.models.gae import gae, returns_to_go, token_rewards, trained_lengths
from staleflow.clients.trainer.algorithms.advantages import dr_grpo, whitened
from staleflow.clients.trainer.algorithms.aggregation import aggregation_of, scale, weights
from staleflow.clients.trainer.algorithms.choice import TrainedTokens, group_advantage, token_loss
from staleflow.clients.trainer.algorithms.distillation import teacher_advantage
from staleflow.clients.trainer.algorithms.ess import TrajectoryWeights, lr_factor
from staleflow.clients.trainer.algorithms.kl import kl_loss
from staleflow.clients.trainer.algorithms.losses import TokenLoss, clippable, squared_log_ratio
from staleflow.clients.trainer.algorithms.mismatch import MismatchSums
from staleflow.clients.trainer.algorithms.second_moment import largest_kept
from staleflow.clients.trainer.algorithms.sequence_losses import row_mean
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.configs.errors import ConfigError
from staleflow.configs.rules.algorithm import OVER_BATCH, PER_TOKEN
from staleflow.configs.schema import Config

Column = TypeVar("Column")

REFERENCE: Final = "reference/logprobs"
"""Stage column: the reference model's log-probability of each completion token."""
MAX_AGE: Final = 15
"""Age in versions at which metrics by age stop to distinguish: older tokens count with it."""
VALUES: Final = "critic/values"
"""Stage column: the critic's value of the state in which each completion token was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """The completion tokens of one forward pass, flat, trajectory after trajectory (for padded and packed passes)."""

    row: Tensor
    """int64 [T]: the token's trajectory, as a row of the rank's ``TrainBatch``; a pass contains whole trajectories."""
    mask: Tensor
    """bool [T]: trained."""
    behavior: Tensor
    """float32 [T]: the engine's log-probabilities."""
    version: Tensor
    """int64 [T]: the version that generated the token."""
    stages: Mapping[str, Tensor]
    """float32 [T] each: per-token stage columns by name, ``reference/logprobs``, ``critic/values``."""
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """[T, *shape] each: typed columns with one value a token, by name."""


def tokens_of(batch: TrainBatch, which: NDArray[np.int64], device: torch.device) -> Tokens:
    """Return the completion tokens (``batch.completions``) of the rows ``which``, in that order."""
    chosen = batch.completions[which]

    def flat(column: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(column[which][chosen]).to(device)

    return Tokens(
        row=torch.from_numpy(np.repeat(which, batch.completion_lengths[which])).to(device),
        mask=flat(batch.loss_mask),
        behavior=flat(batch.behavior_logprobs),
        version=flat(batch.token_versions),
        stages={name: flat(column) for name, column in batch.token_stages.items()},
        columns={name: flat(column) for name, column in batch.token_columns.items()},
    )


class Reduce(Protocol):
    """Element-wise reductions over the ranks of a trainer; every rank gets the result."""

    def sum(self, values: Tensor) -> Tensor: ...

    def max(self, values: Tensor) -> Tensor: ...


class _Local:
    """Identity, for a single rank."""

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values


LOCAL: Final[Reduce] = _Local()


class Objective:
    """The objective of one train step: ``begin``, ``take``, ``loss`` per pass, ``scale``, ``values``."""

    def __init__(self, config: Config, device: torch.device, reduce: Reduce = LOCAL) -> None:
        self._algorithm = config.trainer.algorithm
        self._longest = config.rollout.max_new_tokens
        self._max_age = min(config.staleness.max_staleness, MAX_AGE)
        self._device = device
        self._reduce = reduce
        self._how = aggregation_of(self._algorithm.advantage, self._algorithm.loss, self._algorithm.loss_agg)
        self._loss = token_loss(self._algorithm)
        beyond = self._algorithm.advantage in (*PER_TOKEN, *OVER_BATCH)
        self._group_advantage = None if beyond else group_advantage(self._algorithm.advantage)

    @property
    def surveys(self) -> bool:
        """True if every pass must be given to ``survey`` before the first ``loss``: a second forward pass."""
        return self._algorithm.loss == "m2po"

    @property
    def by_group(self) -> bool:
        """True if the advantages of a group depend on no other group and no other rank."""
        return self._group_advantage is not None

    def begin(self) -> None:
        """Reset the state for a new step."""
        self._counts = torch.zeros(3, dtype=torch.float64, device=self._device)
        self._scale = 1.0
        self._sums = torch.zeros(6, dtype=torch.float64, device=self._device)
        self._terms = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._trajectories = TrajectoryWeights(self._device)
        self._mismatch = MismatchSums(self._device, self._max_age)
        self._old: Tensor | None = None
        self._squares: list[Tensor] = []
        self._limit = math.inf

    def take(self, batch: TrainBatch) -> None:
        """Add the rank's rows of the next passes, as whole groups. ``ConfigError`` if a stage column is missing."""
        self._step = int(batch.step)
        self.replace_rows(
            batch.completion_lengths, self._advantages_of(batch, torch.from_numpy(batch.completion_lengths))
        )
        self._counts += self._counts_of(batch.loss_mask)

    @property
    def advantages(self) -> Tensor:
        """Return the advantages of the rows taken last, float32, flat over all their completion tokens."""
        return self._advantages

    def replace_rows(self, lengths: NDArray[np.int64], advantages: Tensor) -> None:
        """Replace the rows taken last, after ranks exchanged some, by rows of these completion lengths.

        The counts for ``scale`` remain, because all ranks together still have the same rows.
        """
        ends = torch.from_numpy(lengths)
        self._first = (ends.cumsum(0) - ends).to(self._device)
        self._advantages = advantages.to(self._device)

    def remember(self, old: Tensor) -> None:
        """Set the old policy's log-probabilities, float32, flat over all completion tokens of the rows taken.

        Without it, the old policy is the current one. Discards the metrics of all ``loss`` so far.
        """
        self._old = old
        self._mismatch = MismatchSums(self._device, self._max_age)
        self._drift = MismatchSums(self._device)

    def start_update(self, batch: TrainBatch, rows: NDArray[np.int64]) -> None:
        """Start the next of several updates, on some of the rows taken: ``scale`` and ``update_values`` are its own."""
        self._counts = self._counts_of(batch.loss_mask[rows])
        self._sums.zero_()
        self._terms.zero_()
        self._trajectories = TrajectoryWeights(self._device)

    def scale(self) -> float:
        """Return the factor for the sum of all ``loss``. Called once, after all rows of the step were taken."""
        self._counts = self._reduce.sum(self._counts)
        tokens, sequences, trajectories = self._counts.tolist()
        self._scale = scale(self._how, tokens=tokens, sequences=sequences, trajectories=trajectories)
        return self._scale

    def pass_weight(self, batch: TrainBatch, which: NDArray[np.int64]) -> float:
        """Return the weight of a pass in a mean over the batch, in the unit of ``scale``; 0 without a trained token."""
        tokens, sequences, trajectories = self._counts_of(batch.loss_mask[which]).tolist()
        return 1.0 / scale(self._how, tokens=tokens, sequences=sequences, trajectories=trajectories) if tokens else 0.0

    def survey(self, logprobs: Tensor, tokens: Tokens) -> None:
        """Record a pass's log-probabilities at the start of the step, float32 [T] without gradient."""
        logprobs, behavior = logprobs[tokens.mask], tokens.behavior[tokens.mask]
        advantages = self._advantages_of_trained(tokens) + self._algorithm.distill_coef * self._taught(logprobs, tokens)
        bounded = clippable(logprobs, behavior, advantages)
        self._squares.append(squared_log_ratio(logprobs, behavior)[bounded])

    def surveyed(self) -> None:
        """Finish the survey; called once on every rank, before the first ``loss``."""
        squares = torch.cat([torch.zeros(0, dtype=torch.float64, device=self._device), *self._squares])
        self._limit = largest_kept(squares, self._algorithm.m2_threshold, self._reduce)
        self._squares.clear()

    def loss(self, logprobs: Tensor, tokens: Tokens, entropy: Tensor | None = None) -> Tensor:
        """Return a scalar with gradient; ``logprobs`` float32 [T] are the current model's at the sampling temperature.

        ``entropy`` float32 [T]: the entropy of the model's distribution at each token; required if ``entropy_coef`` is
        above 0.

        The sum over all passes of all ranks, times ``scale``, is the loss of the whole batch. It is not divided by the
        world size; a backend that averages gradients over ranks must multiply by it.
        """
        mask = tokens.mask
        at = TrainedTokens(
            logprobs=logprobs[mask],
            behavior=tokens.behavior[mask],
            advantages=self._advantages_of_trained(tokens),
            row=tokens.row[mask],
            age=self._step - tokens.version[mask],
            stages={name: column[mask] for name, column in tokens.stages.items()},
            columns={name: column[mask] for name, column in tokens.columns.items()},
            start=None if self._old is None else self._old[self._places(tokens.row)[mask]],
        )
        if at.logprobs.numel() == 0:  # losses need not handle this case; other ranks wait in the backward pass
            return at.logprobs.sum()
        taught = self._taught(at.old, tokens)
        at = replace(at, advantages=at.advantages + self._algorithm.distill_coef * taught)
        result = self._loss(at, self._limit)
        weight = weights(self._how, at.row, self._longest)
        loss = (result.loss * weight).sum()
        if self._algorithm.entropy_coef:
            assert entropy is not None
            loss = loss - self._algorithm.entropy_coef * (entropy[mask] * weight).sum()
            self._terms[0] += entropy[mask].detach().sum(dtype=torch.float64)
        self._terms[1] -= taught.sum(dtype=torch.float64)
        divergence = self._divergence(at.logprobs, tokens)
        if divergence is not None and not self._algorithm.kl_in_reward:
            loss = loss + self._algorithm.kl_coef * (divergence * weight).sum()
        self._count(loss, result, at, divergence)
        return loss

    def values(self) -> dict[str, float]:
        """Return the metrics of the step over all ranks; requires ``scale``.

        ``loss``, with all of its terms; ``mismatch_kl`` and ``is_weight/*`` of the engine's tokens; ``clip/low``,
        ``clip/high``, ``masked/token``: fractions of the trained tokens; ``masked/sequence``: fraction of the
        trajectories that lost all tokens to a mask; ``kl/reference`` and ``kl/teacher`` in nats per token, if there is
        a reference or a teacher; ``entropy`` of the trainer's model, if it is part of the loss; by age, see
        ``MismatchSums``. ``approx_kl`` from the old to the current policy in nats per token, if the step has several
        updates. Then ``mismatch_kl``, ``is_weight/*`` and ``approx_kl`` are those of the step, the others those of its
        last update.
        """
        values = self.update_values() | self._mismatch.values(self._reduce)
        if self._old is not None:
            values["approx_kl"] = self._drift.values(self._reduce)["mismatch_kl"]
        return values

    def update_values(self) -> dict[str, float]:
        """Return the metrics of the current update over all ranks; requires ``scale``."""
        loss, low, high, masked, silent, divergence = self._reduce.sum(self._sums).tolist()
        tokens, sequences, _ = (max(count, 1.0) for count in self._counts.tolist())
        values = {
            "loss": loss * self._scale,
            "clip/low": low / tokens,
            "clip/high": high / tokens,
            "masked/token": masked / tokens,
            "masked/sequence": silent / sequences,
        }
        if self._algorithm.kl_coef:
            values["kl/reference"] = divergence / tokens
        entropy, apart = self._reduce.sum(self._terms).tolist()
        if self._algorithm.entropy_coef:
            values["entropy"] = entropy / tokens
        if self._algorithm.distill_coef:
            values["kl/teacher"] = apart / tokens
        return values

    def _counts_of(self, loss_mask: NDArray[np.bool_]) -> Tensor:
        """Return the numbers of trained tokens, of trajectories with a trained token, and of trajectories."""
        counts = (int(loss_mask.sum()), int(loss_mask.any(axis=1).sum()), len(loss_mask))
        return torch.tensor(counts, dtype=torch.float64, device=self._device)

    def lr_factor(self) -> float:
        """Return the factor of the step's learning rate, from above 0 to 1. Every rank must call it equally often."""
        return lr_factor(self._trajectories.ess(self._reduce)) if self._algorithm.ess_scaled_lr else 1.0

    def _advantages_of(self, batch: TrainBatch, lengths: Tensor) -> Tensor:
        """Return float32 advantages, flat over all completion tokens of the rank's rows, trained or not."""
        rewards, algorithm = torch.from_numpy(batch.rewards), self._algorithm
        if self._group_advantage is not None:
            stages = {name: torch.from_numpy(column) for name, column in batch.sample_stages.items()}
            numbers = {name: column for name, column in batch.sample_columns.items() if column.dtype != object}
            columns = {name: torch.from_numpy(column) for name, column in numbers.items()}
            each = self._group_advantage(rewards, torch.from_numpy(batch.group_ids), stages, columns)
            return each.repeat_interleave(lengths)
        mask, costs = torch.from_numpy(batch.loss_mask[batch.completions]), None
        steps = trained_lengths(mask, lengths)

        def trained(column: NDArray[Any]) -> Tensor:
            return torch.from_numpy(column[batch.completions])[mask]

        if algorithm.advantage in OVER_BATCH:
            each = dr_grpo(rewards, torch.from_numpy(batch.group_ids)).repeat_interleave(lengths)[mask]
            each = whitened(each.to(self._device), self._reduce)
            return torch.zeros(len(mask)).masked_scatter(mask, each.cpu())
        if algorithm.kl_in_reward:
            reference = trained(_column(batch.token_stages, REFERENCE))
            costs = algorithm.kl_coef * (trained(batch.behavior_logprobs) - reference)
        earned = token_rewards(rewards, steps, costs)
        if algorithm.advantage == "gae":
            critic = trained(_column(batch.token_stages, VALUES))
            each = gae(earned, critic, steps, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda)
        else:
            each = returns_to_go(earned, steps)
        if algorithm.advantage == "reinforce_pp" or algorithm.whiten_advantages:
            each = whitened(each.to(self._device), self._reduce)
        return torch.zeros(len(mask)).masked_scatter(mask, each.cpu())

    def _advantages_of_trained(self, tokens: Tokens) -> Tensor:
        return self._advantages[self._places(tokens.row)[tokens.mask]]

    def _taught(self, old: Tensor, tokens: Tokens) -> Tensor:
        """Return the teacher's advantage [T] of the trained tokens, 0 without a teacher."""
        if not self._algorithm.distill_coef:
            return torch.zeros_like(old)
        name = self._algorithm.teacher
        found = (tokens.stages if "/" in name else tokens.columns).get(name)
        if found is None or found.dim() != 1:
            allowed = "its batches must have this column with one number a token; this one has not"
            raise ConfigError("trainer.algorithm.teacher", name, allowed)
        return teacher_advantage(old, found[tokens.mask])

    def _places(self, row: Tensor) -> Tensor:
        """Return the index of each token's advantage: its row's start plus its position within the row."""
        kinds, count = torch.unique_consecutive(row, return_counts=True)
        start: Tensor = self._first[kinds] - (count.cumsum(0) - count)
        places: Tensor = torch.arange(len(row), device=row.device) + start.repeat_interleave(count)
        return places

    def _divergence(self, logprobs: Tensor, tokens: Tokens) -> Tensor | None:
        """Return the divergence from the reference model, [T] over the trained tokens; None without a reference."""
        if not self._algorithm.kl_coef:
            return None
        return kl_loss(self._algorithm.kl, logprobs, _column(tokens.stages, REFERENCE)[tokens.mask])

    def _count(self, loss: Tensor, result: TokenLoss, at: TrainedTokens, divergence: Tensor | None) -> None:
        silent = row_mean(result.masked.to(torch.float32), at.row) == 1.0
        first = torch.ones_like(silent)
        first[1:] = at.row[1:] != at.row[:-1]
        parts = [loss, result.low.sum(), result.high.sum(), result.masked.sum(), (silent & first).sum()]
        parts.append(torch.zeros_like(loss) if divergence is None else divergence.sum())
        self._sums += torch.stack([part.detach().to(torch.float64) for part in parts])
        clipped = result.low | result.high
        self._mismatch.add(at.old, at.behavior, at.age, truncated=result.truncated, clipped=clipped)
        if at.start is not None:
            self._drift.add(at.logprobs, at.start, at.age, truncated=result.truncated, clipped=clipped)
        if self._algorithm.ess_scaled_lr:
            self._trajectories.add(at.old, at.behavior, at.row)


def _column(stages: Mapping[str, Column], name: str) -> Column:
    if name not in stages:
        key, value = ("advantage", "gae") if name == VALUES else ("kl_coef", "above 0")
        raise ConfigError(f"trainer.algorithm.{key}", value, f"its batches must have the stage column {name}; none did")
    return stages[name]
