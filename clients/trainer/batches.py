"""A sealed batch as padded columns, and its cut into micro-batches. Numpy only.

One row a trajectory: prompt, completion, padding on the right. Rows are in the order of the batch's members, so that
the same batch gives the same arrays whenever and wherever it is fetched.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.protocols.consistency.ids import BatchId, GroupId, Lineage, Step
from staleflow.protocols.wire.messages import Batch
from staleflow.protocols.wire.stages import REWARD_COLUMN, is_per_token, short_name
from staleflow.protocols.wire.trajectory import GroupPayload

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
    fetched = list(groups)
    size = sum(item.payload.num_samples for item in fetched)
    longest = max(
        (len(item.payload.prompt_ids) + int(item.payload.lengths.max(initial=0)) for item in fetched), default=0
    )
    columns = _Columns(size, longest)
    for item in fetched:
        columns.add(item)
    fresh = columns.token_versions >= batch.mask_below
    masked = int((columns.loss_mask & ~fresh).sum())
    return TrainBatch(
        step=batch.step,
        batch=batch.batch,
        lineage=batch.lineage,
        digest=batch.digest,
        attempt=batch.attempt,
        input_ids=columns.input_ids,
        attention_mask=columns.attention_mask,
        loss_mask=columns.loss_mask & fresh,
        behavior_logprobs=columns.behavior_logprobs,
        token_versions=columns.token_versions,
        rewards=columns.rewards,
        group_ids=columns.group_ids,
        completion_lengths=columns.completion_lengths,
        masked_tokens=masked,
        rows=tuple(columns.rows),
        token_stages=columns.token_stages,
        sample_stages=columns.sample_stages,
    )


class _Columns:
    """The arrays of a batch while it fills."""

    def __init__(self, size: int, longest: int) -> None:
        self.input_ids = np.zeros((size, longest), np.int64)
        self.attention_mask = np.zeros((size, longest), np.int64)
        self.loss_mask = np.zeros((size, longest), np.bool_)
        self.behavior_logprobs = np.zeros((size, longest), np.float32)
        self.token_versions = np.full((size, longest), NO_VERSION, np.int64)
        self.rewards = np.zeros(size, np.float32)
        self.group_ids = np.zeros(size, np.int64)
        self.completion_lengths = np.zeros(size, np.int64)
        self.rows: list[dict[str, Any]] = []
        self.token_stages: dict[str, NDArray[np.float32]] = {}
        self.sample_stages: dict[str, NDArray[np.float32]] = {}

    def add(self, item: FetchedGroup) -> None:
        payload, first = item.payload, len(self.rows)
        prompt, versions = len(payload.prompt_ids), payload.token_versions()
        stages = [(self._token_stage(name), made) for name, made in payload.stages.items() if is_per_token(name)]
        token = 0
        for sample, length in enumerate(payload.lengths.tolist()):
            here, there = (first + sample, slice(prompt, prompt + length)), slice(token, token + length)
            self.input_ids[first + sample, :prompt] = payload.prompt_ids
            self.input_ids[here] = payload.token_ids[there]
            self.attention_mask[first + sample, : prompt + length] = 1
            self.loss_mask[here] = payload.loss_mask[there] != 0
            self.behavior_logprobs[here] = payload.logprobs[there]
            self.token_versions[here] = np.where(payload.loss_mask[there] != 0, versions[there], NO_VERSION)
            for column, made in stages:
                column[here] = made[there]
            token += length
        samples = slice(first, first + payload.num_samples)
        self.completion_lengths[samples] = payload.lengths
        self.group_ids[samples] = item.group
        self.rewards[samples] = payload.stages[REWARD_COLUMN]
        for name, made in payload.stages.items():
            if not is_per_token(name):
                self._sample_stage(name)[samples] = made
        self.rows.extend([item.row] * payload.num_samples)

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
