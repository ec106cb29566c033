"""A sealed batch as padded columns, and its split into forward passes. NumPy only.

Each trajectory is one row: prompt, completion, padding on the right. Rows are in the order of the batch's members, so
that a batch always gives the same arrays.
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
from staleflow.protocols.wire.typed_columns import SAMPLE, SIZES, TOKEN, byte_strings

NO_VERSION = -1
"""Value in ``token_versions`` for tokens that no policy sampled (prompt, padding, environment output)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The data of one step: N trajectories, L tokens in the longest. The caller may modify the arrays."""

    step: Step
    batch: BatchId
    lineage: Lineage
    digest: str
    """Hex sha256 over the members; equal for equal data."""
    attempt: int
    """Number of times that the service has delivered this batch."""
    input_ids: NDArray[np.int64]
    """[N, L]"""
    attention_mask: NDArray[np.int64]
    """[N, L]: 1 for prompt and completion, 0 for padding."""
    loss_mask: NDArray[np.bool_]
    """[N, L]: tokens to train on."""
    behavior_logprobs: NDArray[np.float32]
    """[N, L]: log-probability of the token at this position, as the engine sampled it; 0 elsewhere."""
    token_versions: NDArray[np.int64]
    """[N, L]: the version that generated the token, or -1."""
    rewards: NDArray[np.float32]
    """[N]"""
    group_ids: NDArray[np.int64]
    """[N]"""
    completion_lengths: NDArray[np.int64]
    """[N]: tokens after the prompt: sampled tokens, trained or not, and environment output between them."""
    cut: NDArray[np.bool_]
    """[N]: True for a trajectory that did not end by itself but reached the length limit or was truncated."""
    masked_tokens: int
    """Number of tokens that the token bound removed from ``loss_mask``."""
    rows: tuple[dict[str, Any], ...]
    """[N]: the columns of each trajectory's prompt row."""
    token_stages: dict[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])
    """[N, L] each, by ``stage/column``: per-token columns of stages, 0 where undefined."""
    sample_stages: dict[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])
    """[N] each, by ``stage/column``: per-sample columns of stages and of the environment, NaN where undefined."""
    token_columns: dict[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    """[N, L, *shape] each, by name: typed columns of ``[[column]]`` with one value a token, 0 where undefined."""
    sample_columns: dict[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    """[N, *shape] each, by name: typed columns with one value a sample, 0 where undefined. Byte strings are an object
    array of ``bytes``, b"" where undefined."""

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def sequence_lengths(self) -> NDArray[np.int64]:
        """[N]: length of prompt and completion."""
        return np.asarray(self.attention_mask.sum(axis=1), np.int64)

    @property
    def sampled_lengths(self) -> NDArray[np.int64]:
        """[N]: number of tokens that the policy generated, trained or not."""
        return np.asarray((self.token_versions != NO_VERSION).sum(axis=1), np.int64)

    @property
    def completions(self) -> NDArray[np.bool_]:
        """[N, L]: True for tokens after the prompt."""
        place: NDArray[np.int64] = np.asarray(range(self.input_ids.shape[1]), np.int64)
        end = self.sequence_lengths[:, None]
        return (place >= end - self.completion_lengths[:, None]) & (place < end)

    def mask_cut(self) -> None:
        """Remove trajectories that did not end by themselves from ``loss_mask``."""
        self.loss_mask[self.cut] = False

    def off_policy(self) -> tuple[float, int]:
        """Return mean and maximum of (step - version) over the trained tokens; 0 without any."""
        age = int(self.step) - self.token_versions[self.loss_mask]
        return (float(age.mean()), int(age.max())) if age.size else (0.0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedGroup:
    """One batch member as its shard returned it."""

    group: GroupId
    row: dict[str, Any]
    payload: GroupPayload


def assemble(batch: Batch, groups: Iterable[FetchedGroup]) -> TrainBatch:
    """Build the batch's columns; ``groups`` in the order of the members. Applies the token bound's mask."""
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
        token_columns=columns.token_columns,
        sample_columns=columns.sample_columns,
    )


class _Columns:
    """The arrays of a batch while they are filled.

    A ragged column of a group is copied to its rows in one assignment, through the mask of their completions: every
    value is copied once, without a Python loop over values.
    """

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
        self.token_columns: dict[str, NDArray[Any]] = {}
        self.sample_columns: dict[str, NDArray[Any]] = {}
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
        for name, values in payload.stages.items():
            if is_per_token(name):
                self._token_stage(name)[rows][completions] = values
            else:
                self._sample_stage(name)[rows] = values
        for name, array in payload.columns.items():
            if name.endswith(SIZES):
                continue
            if name.startswith(TOKEN):
                self._token_column(name.removeprefix(TOKEN), array)[rows][completions] = array
            elif (sizes := payload.columns.get(name + SIZES)) is not None:
                self._sample_column(name.removeprefix(SAMPLE), None)[rows] = byte_strings(array, sizes)
            else:
                self._sample_column(name.removeprefix(SAMPLE), array)[rows] = array
        self.rows.extend([item.row] * payload.num_samples)

    def mask(self, below: Version) -> int:
        """Remove tokens of versions under ``below`` from the loss mask; return their number."""
        if below <= NO_VERSION:
            return 0
        stale = self.loss_mask & (self.token_versions < below)
        self.loss_mask ^= stale
        return int(np.count_nonzero(stale))

    def _token_column(self, name: str, like: NDArray[Any]) -> NDArray[Any]:
        if name not in self.token_columns:
            self.token_columns[name] = np.zeros(self.input_ids.shape + like.shape[1:], like.dtype)
        return self.token_columns[name]

    def _sample_column(self, name: str, like: NDArray[Any] | None) -> NDArray[Any]:
        """Return the column. ``like``: an array of such values; None: byte strings."""
        if name not in self.sample_columns:
            count = len(self.rewards)
            empty = np.full(count, b"", object) if like is None else np.zeros((count, *like.shape[1:]), like.dtype)
            self.sample_columns[name] = empty
        return self.sample_columns[name]

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
    """Return some rows of a batch as a separate batch."""
    chosen: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    chosen |= {name: value[which] for name, value in chosen.items() if isinstance(value, np.ndarray)}
    chosen["rows"] = tuple(batch.rows[int(row)] for row in which)
    for columns in ("token_stages", "sample_stages", "token_columns", "sample_columns"):
        chosen[columns] = {name: column[which] for name, column in chosen[columns].items()}
    return TrainBatch(**chosen)
