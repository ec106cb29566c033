"""A sealed batch as padded columns, and its cut into micro-batches. Numpy only.

One row a trajectory: prompt, completion, padding on the right. Rows are in the order of the batch's members, so that
the same batch gives the same arrays whenever and wherever it is fetched.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.protocols.consistency.ids import BatchId, GroupId, Lineage, Step, Version
from staleflow.protocols.wire.messages import Batch
from staleflow.protocols.wire.stages import REWARD_COLUMN, is_per_token, short_name
from staleflow.protocols.wire.trajectory import Finish, GroupPayload

NO_VERSION = -1
"""In ``token_versions``: nobody sampled this token (prompt, padding, what an environment wrote)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One step's data: N trajectories, L tokens of the longest. The caller may change the arrays."""

    step: Step
    batch: BatchId
    lineage: Lineage
    digest: str
    """Hex sha256 over the members: equal for equal data."""
    attempt: int
    """How often the service has handed out this batch."""
    input_ids: NDArray[np.int64]
    """[N, L]"""
    attention_mask: NDArray[np.int64]
    """[N, L]: 1 for prompt and completion, 0 for padding."""
    loss_mask: NDArray[np.bool_]
    """[N, L]: tokens to train on."""
    behavior_logprobs: NDArray[np.float32]
    """[N, L]: of the token at that place, as the engine sampled it; 0 elsewhere."""
    token_versions: NDArray[np.int64]
    """[N, L]: the version that wrote the token, or -1."""
    rewards: NDArray[np.float32]
    """[N]"""
    group_ids: NDArray[np.int64]
    """[N]"""
    completion_lengths: NDArray[np.int64]
    """[N]: tokens behind the prompt: sampled ones, trained or not, and what an environment wrote between them."""
    cut: NDArray[np.bool_]
    """[N]: True for a trajectory that did not come to its own end: it was as long as it may be, or truncated."""
    masked_tokens: int
    """Tokens that the token bound took out of ``loss_mask``."""
    rows: tuple[dict[str, Any], ...]
    """[N]: the columns of each trajectory's prompt row."""
    token_stages: dict[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])
    """[N, L] each, by ``stage/column``: per-token columns of stages, 0 where there is none."""
    sample_stages: dict[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])
    """[N] each, by ``stage/column``: per-sample columns of stages and of the environment, NaN where there is none."""

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def sequence_lengths(self) -> NDArray[np.int64]:
        """[N]: prompt and completion."""
        return np.asarray(self.attention_mask.sum(axis=1), np.int64)

    @property
    def sampled_lengths(self) -> NDArray[np.int64]:
        """[N]: tokens that the policy wrote, trained or not."""
        return np.asarray((self.token_versions != NO_VERSION).sum(axis=1), np.int64)

    @property
    def completions(self) -> NDArray[np.bool_]:
        """[N, L]: tokens behind the prompt."""
        place: NDArray[np.int64] = np.asarray(range(self.input_ids.shape[1]), np.int64)
        end = self.sequence_lengths[:, None]
        return (place >= end - self.completion_lengths[:, None]) & (place < end)

    def mask_cut(self) -> None:
        """Take trajectories that did not come to their own end out of ``loss_mask``."""
        self.loss_mask[self.cut] = False

    def off_policy(self) -> tuple[float, int]:
        """Mean and maximum of (step - version) over the trained tokens; 0 without any."""
        age = int(self.step) - self.token_versions[self.loss_mask]
        return (float(age.mean()), int(age.max())) if age.size else (0.0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedGroup:
    """One member as the shard gave it."""

    group: GroupId
    row: dict[str, Any]
    payload: GroupPayload


def assemble(batch: Batch, groups: Iterable[FetchedGroup]) -> TrainBatch:
    """The batch as columns; ``groups`` in the order of the members. The token bound's mask is applied."""
    columns = _Columns(list(groups))
    masked = columns.mask(batch.mask_below)
    return TrainBatch(
        step=batch.step,
        batch=batch.batch,
        lineage=batch.lineage,
        digest=batch.digest,
        attempt=batch.attempt,
        input_ids=columns.input_ids,
        attention_mask=columns.attention_mask,
        loss_mask=columns.loss_mask,
        behavior_logprobs=columns.behavior_logprobs,
        token_versions=columns.token_versions,
        rewards=columns.rewards,
        group_ids=columns.group_ids,
        completion_lengths=columns.completion_lengths,
        cut=columns.cut,
        masked_tokens=masked,
        rows=tuple(columns.rows),
        token_stages=columns.token_stages,
        sample_stages=columns.sample_stages,
    )


class _Columns:
    """The arrays of a batch. A ragged column of a group goes to its rows in one assignment, by the mask of their
    completions: one copy of every value, and none of them touched by Python."""

    def __init__(self, fetched: list[FetchedGroup]) -> None:
        samples = [item.payload.num_samples for item in fetched]
        prompts = np.repeat([len(item.payload.prompt_ids) for item in fetched], samples)[:, None]
        lengths = [item.payload.lengths for item in fetched]
        self.completion_lengths = np.concatenate(lengths, dtype=np.int64) if fetched else np.zeros(0, np.int64)
        ends = prompts + self.completion_lengths[:, None]
        place = np.arange(int(ends.max(initial=0)), dtype=np.int32)
        written = place < ends.astype(np.int32)
        shape = written.shape
        self._completions: NDArray[np.bool_] = written & (place >= prompts.astype(np.int32))
        self.attention_mask = written.astype(np.int64)
        self.input_ids = np.zeros(shape, np.int64)
        self.loss_mask = self._completions.copy()
        self.behavior_logprobs = np.zeros(shape, np.float32)
        self.token_versions = np.full(shape, NO_VERSION, np.int64)
        self.rewards = np.zeros(len(ends), np.float32)
        self.cut = np.zeros(len(ends), np.bool_)
        self.group_ids = np.repeat(np.asarray([item.group for item in fetched], np.int64), samples)
        self.rows: list[dict[str, Any]] = []
        self.token_stages: dict[str, NDArray[np.float32]] = {}
        self.sample_stages: dict[str, NDArray[np.float32]] = {}
        for item in fetched:
            self._add(item)

    def _add(self, item: FetchedGroup) -> None:
        payload, first = item.payload, len(self.rows)
        rows = slice(first, first + payload.num_samples)
        completions = self._completions[rows]
        self.input_ids[rows, : len(payload.prompt_ids)] = payload.prompt_ids
        self.input_ids[rows][completions] = payload.token_ids
        self.behavior_logprobs[rows][completions] = payload.logprobs
        versions = payload.token_versions()
        if not payload.all_sampled():
            self.loss_mask[rows][completions] = payload.loss_mask
            versions = np.where(payload.loss_mask, versions, NO_VERSION)
        self.token_versions[rows][completions] = versions
        self.rewards[rows] = payload.stages[REWARD_COLUMN]
        self.cut[rows] = payload.finish != Finish.STOP
        for name, made in payload.stages.items():
            if is_per_token(name):
                self._token_stage(name)[rows][completions] = made
            else:
                self._sample_stage(name)[rows] = made
        self.rows.extend([item.row] * payload.num_samples)

    def mask(self, below: Version) -> int:
        """Take tokens of versions under ``below`` out of the loss mask; how many there were."""
        if below <= NO_VERSION:
            return 0
        stale = self.loss_mask & (self.token_versions < below)
        self.loss_mask ^= stale
        return int(np.count_nonzero(stale))

    def _token_stage(self, name: str) -> NDArray[np.float32]:
        short = short_name(name)
        if short not in self.token_stages:
            self.token_stages[short] = np.zeros(self.input_ids.shape, np.float32)
        return self.token_stages[short]

    def _sample_stage(self, name: str) -> NDArray[np.float32]:
        short = short_name(name)
        if short not in self.sample_stages:
            self.sample_stages[short] = np.full(len(self.rewards), np.nan, np.float32)
        return self.sample_stages[short]


def rows_of(batch: TrainBatch, which: NDArray[np.int64]) -> TrainBatch:
    """Some rows of a batch, as a batch of their own."""
    chosen: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    chosen |= {name: value[which] for name, value in chosen.items() if isinstance(value, np.ndarray)}
    chosen["rows"] = tuple(batch.rows[int(row)] for row in which)
    for stages in ("token_stages", "sample_stages"):
        chosen[stages] = {name: column[which] for name, column in chosen[stages].items()}
    return TrainBatch(**chosen)


def micro_batches(lengths: NDArray[np.int64], micro_tokens: int) -> list[NDArray[np.int64]]:
    """Rows of each forward pass: longest first, as many as fit ``micro_tokens`` once padded to the longest of them.

    A row longer than that goes alone. Depends on the lengths only; equal ones keep their order.
    """
    order = np.argsort(-lengths, kind="stable")
    cuts: list[NDArray[np.int64]] = []
    start = 0
    while start < len(order):
        fits = max(1, micro_tokens // max(1, int(lengths[order[start]])))
        cuts.append(order[start : start + fits])
        start += fits
    return cuts
