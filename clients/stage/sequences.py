"""Trajectories of some groups as padded rows, their split into passes, and the way back to per-token columns.

A row is prompt, completion and padding on the right, group after group. Position t of a row is the same token as
position t of the trainer's batch. Numpy only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.models.passes import padded_passes
from staleflow.protocols.wire.trajectory import GroupPayload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """N trajectories, padded to the length L of the longest."""

    input_ids: NDArray[np.int64]
    """[N, L]"""
    ends: NDArray[np.int64]
    """[N]: tokens of prompt and completion."""
    completions: NDArray[np.bool_]
    """[N, L]"""
    groups: tuple[int, ...]
    """Number of trajectories of each group."""

    def passes(self, micro_tokens: int) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Yield the rows of each pass through the model and their width: at most ``micro_tokens`` after padding."""
        for which in padded_passes(self.ends, micro_tokens):
            yield which, int(self.ends[which].max())

    def columns(self, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Map [N, L] to each group's completion tokens, [T], sample after sample."""
        ends = np.cumsum(self.groups)
        return [values[a:b][self.completions[a:b]] for a, b in zip(ends - self.groups, ends, strict=True)]


def rows_of(payloads: Sequence[GroupPayload]) -> Rows:
    """Pad all trajectories of some groups."""
    prompts = np.concatenate([np.full(p.num_samples, len(p.prompt_ids), np.int64) for p in payloads])
    lengths = np.concatenate([p.lengths.astype(np.int64) for p in payloads])
    ends = prompts + lengths
    place = np.arange(int(ends.max(initial=0)))
    completions = (place >= prompts[:, None]) & (place < ends[:, None])
    input_ids = np.zeros(completions.shape, np.int64)
    input_ids[completions] = np.concatenate([p.token_ids for p in payloads])
    owners = np.repeat(np.arange(len(payloads)), [p.num_samples for p in payloads])
    for row, group in enumerate(owners.tolist()):
        input_ids[row, : prompts[row]] = payloads[group].prompt_ids
    return Rows(input_ids=input_ids, ends=ends, completions=completions, groups=tuple(p.num_samples for p in payloads))
