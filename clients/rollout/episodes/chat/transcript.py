"""The tokens of one episode, turn by turn, and the conversion of a group of episodes into a payload. Pure.

A turn consists of given tokens, which come from the environment, and the tokens that the policy then generated. The
tokens given before the first turn are the prompt. The samples of a group share the common part of their prompts; the
rest begins their completions. In a completion, given tokens have loss mask 0 and log-probability 0. Generated tokens
have loss mask 1 and the engine's log-probabilities.

Given tokens belong to the segment of the turn that follows, since the version that generated its first token is the one
that read them. Segments therefore cover all tokens, none is older than the lease's version, and a group is exactly as
old and as new as its generated tokens. Output of the environment after the last turn is not kept, as no model reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import ColumnError, TokenSegment
from staleflow.protocols.wire.trajectory import Finish, GroupPayload
from staleflow.protocols.wire.typed_columns import TypedColumn, encode_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call of the client: ``given`` follows the tokens so far, and ``segments`` (never empty) were sampled next."""

    given: NDArray[np.int32]
    segments: tuple[TokenSegment, ...]
    finish: Finish
    by_text: bool = False
    """The turn ended at a stop string, not at a stop token."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Return the sampled tokens."""
        return np.concatenate([segment.token_ids for segment in self.segments])

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Return the engine's log-probabilities of ``token_ids``."""
        return np.concatenate([segment.logprobs for segment in self.segments])


@dataclass(slots=True)
class Transcript:
    """The turns of one episode so far."""

    turns: list[Turn] = field(default_factory=list[Turn])
    interrupted: bool = False

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Return all tokens: the exact context of the next turn."""
        parts = [part for turn in self.turns for part in (turn.given, turn.token_ids)]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    @property
    def finish(self) -> Finish:
        """Return INTERRUPTED after an interrupt, otherwise the finish of the last turn."""
        return Finish.INTERRUPTED if self.interrupted else self.turns[-1].finish


def cut(segments: Sequence[TokenSegment], tokens: int) -> tuple[TokenSegment, ...]:
    """Return the first ``tokens`` tokens of the segments."""
    kept: list[TokenSegment] = []
    for segment in segments:
        if tokens <= 0:
            break
        kept.append(
            TokenSegment(
                lineage=segment.lineage,
                version=segment.version,
                token_ids=segment.token_ids[:tokens],
                logprobs=segment.logprobs[:tokens],
                columns={name: column[:tokens] for name, column in segment.columns.items()},
            )
        )
        tokens -= len(segment.token_ids)
    return tuple(kept)


def group_payload(
    transcripts: Sequence[Transcript], stages: dict[str, NDArray[np.float32]], columns: Sequence[TypedColumn] = ()
) -> GroupPayload:
    """Convert the episodes of one group, each with at least one turn, into columns.

    ``columns``: typed columns of the run. Given tokens have zeros there. Raise ``ColumnError`` for one that is wrong.
    """
    shared = common_prefix([transcript.turns[0].given for transcript in transcripts])
    arrays = _Columns()
    for sample, transcript in enumerate(transcripts):
        arrays.add(sample, transcript, len(shared))
    try:
        typed = encode_columns(columns, [_typed(each, len(shared), columns) for each in transcripts], arrays.lengths)
    except ValueError as error:
        raise ColumnError(str(error)) from error
    return GroupPayload(
        prompt_ids=shared,
        lengths=np.array(arrays.lengths, np.int32),
        token_ids=np.concatenate(arrays.token_ids).astype(np.int32),
        logprobs=np.concatenate(arrays.logprobs).astype(np.float32),
        loss_mask=np.concatenate(arrays.loss_mask),
        segments=np.array(arrays.segments, np.int64).reshape(-1, 4),
        finish=np.array([transcript.finish for transcript in transcripts], np.uint8),
        stages=stages,
        columns=typed,
    )


def _typed(transcript: Transcript, shared: int, columns: Sequence[TypedColumn]) -> dict[str, NDArray[Any]]:
    """Return the columns of a completion that the engine made for every sampled token."""
    segments = [segment for turn in transcript.turns for segment in turn.segments]
    values: dict[str, NDArray[Any]] = {}
    for name in (column.name for column in columns if all(column.name in segment.columns for segment in segments)):
        parts: list[NDArray[Any]] = []
        for number, turn in enumerate(transcript.turns):
            sampled = [segment.columns[name] for segment in turn.segments]
            given = len(turn.given) - (0 if number else shared)
            parts += [np.zeros((given, *sampled[0].shape[1:]), sampled[0].dtype), *sampled]
        values[name] = np.concatenate(parts)
    return values


def common_prefix(sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return the longest common prefix."""
    first, length = sequences[0], min(len(sequence) for sequence in sequences)
    for sequence in sequences[1:]:
        differs = np.flatnonzero(first[:length] != sequence[:length])
        length = int(differs[0]) if differs.size else length
    return first[:length]


@dataclass(slots=True)
class _Columns:
    """The arrays of a group while it is built."""

    lengths: list[int] = field(default_factory=list[int])
    token_ids: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    logprobs: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    loss_mask: list[NDArray[np.uint8]] = field(default_factory=list[NDArray[np.uint8]])
    segments: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])

    def add(self, sample: int, transcript: Transcript, shared: int) -> None:
        length = 0
        for number, turn in enumerate(transcript.turns):
            given = turn.given[shared:] if number == 0 else turn.given
            written = turn.token_ids
            self.token_ids += [given, written]
            self.logprobs += [np.zeros(len(given), np.float32), turn.logprobs]
            self.loss_mask += [np.zeros(len(given), np.uint8), np.ones(len(written), np.uint8)]
            read = len(given)
            for segment in turn.segments:
                self.segments.append((sample, segment.lineage, segment.version, read + len(segment.token_ids)))
                read = 0
            length += len(given) + len(written)
        self.lengths.append(length)
