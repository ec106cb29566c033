# pyright: basic, reportMissingImports=false
"""Lay out the rows of a pass as one sequence in which the samples of a group share their prompt.

The sequence has each group's prompt once, followed by the rest of each of its rows::

    prompt a | rest a1 | rest a2 | rest a3 | prompt b | rest b1 | rest b2

A rest continues the positions of its prompt and attends to the prompt and to itself. Attention is computed in blocks of
runs of similar length, since only attention depends on more than one token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.trainer.data.batch import TrainBatch

Ints = NDArray[np.int64]

BLOCK_AREA = 1 << 22
"""Maximum number of query-key pairs of a block with a mask: small blocks save more calls than they cost arithmetic."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of consecutive tokens of the sequence, and the prompt before each. All [n]."""

    start: Ints
    length: Ints
    prompt_start: Ints
    prompt_length: Ints
    """0 for a run without a prompt before it."""

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, which: Ints | NDArray[np.bool_] | slice) -> "Runs":
        return Runs(self.start[which], self.length[which], self.prompt_start[which], self.prompt_length[which])


@dataclass(frozen=True, slots=True)
class Block:
    """Padded indices of some runs: their tokens attend to ``keys``."""

    queries: Ints
    """[n, C]"""
    keys: Ints
    """[n, K]: the prompt, then the run itself."""
    mask: NDArray[np.bool_] | None
    """[n, 1, C, K], or None for causal attention that is aligned at the lower right."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """The sequence of a pass."""

    input_ids: Ints
    """[T]"""
    positions: Ints
    """[T]"""
    blocks: list[Block]
    attended: Ints
    """[T]: the place of each token among the queries of all blocks."""
    places: Ints
    """[sum of lengths]: the token of the sequence that stands for each token of each row."""
    predicting: Ints
    """[M]: for each completion token, in the order of ``objective.tokens_of``, the token before it."""
    targets: Ints
    """[M]: the completion tokens."""


def shared_lengths(batch: TrainBatch) -> Ints:
    """Return [N]: the number of leading tokens that each row computes together with other rows of its group.

    These are the longest common prefix of the prompts, hence the whole prompt unless the prompts of a group differ.
    """
    return shared_prefixes(batch.input_ids, batch.sequence_lengths - batch.completion_lengths, batch.group_ids)


def shared_prefixes(input_ids: Ints, prompts: Ints, groups: Ints) -> Ints:
    """Return ``shared_lengths`` for rows with prompts of these lengths."""
    if prompts.max(initial=0) <= 0:
        return np.zeros(len(groups), np.int64)
    order = np.argsort(groups, kind="stable")
    _, first, group, count = np.unique(groups[order], return_index=True, return_inverse=True, return_counts=True)
    width = np.minimum.reduceat(prompts[order], first)
    # All rows of a group have a common prefix exactly as long as each has with the row before it.
    ids = input_ids[order, : int(width.max())]
    differs = np.zeros(ids.shape, np.bool_)
    differs[1:] = ids[1:] != ids[:-1]
    differs[first] = False
    equal = np.where(differs.any(axis=1), differs.argmax(axis=1), ids.shape[1])
    common = np.minimum(np.minimum.reduceat(equal, first), width) * (count > 1)
    shared = np.empty(len(groups), np.int64)
    shared[order] = common[group]
    return shared


def lay_out(
    input_ids: Ints, lengths: Ints, prompts: Ints, groups: Ints, *, block_area: int = BLOCK_AREA, unshared: int = 0
) -> Sequence:
    """Return the sequence of a pass over rows of these lengths, prompt lengths and groups.

    ``unshared``: number of tokens at the end of each prompt that are not shared.
    """
    shared = shared_prefixes(input_ids, prompts - unshared, groups)
    own = lengths - shared
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    alone, opens = shared == 0, np.zeros(len(groups), np.bool_)
    opens[first] = True
    # Each row has two parts: the prompt if it is the first row of its group, then the tokens that it does not share.
    parts = np.stack([shared * opens, own], axis=1).ravel()
    starts = (parts.cumsum() - parts).reshape(-1, 2)
    prompt_start, own_start = starts[first, 0][group], starts[:, 1]
    part, offset = _counted(parts)
    row = part // 2
    positions = offset + np.where(part % 2, shared[row], 0)
    row_of, place = _counted(lengths)
    places = place + np.where(place < shared[row_of], prompt_start[row_of], (own_start - shared)[row_of])
    (completion,) = np.nonzero(place >= prompts[row_of])
    none = np.zeros_like(shared)
    heads = Runs(np.where(alone, own_start, prompt_start), np.where(alone, own, shared), none, none)[alone | opens]
    tails = Runs(own_start, own, prompt_start, shared)[~alone & (own > 0)]
    of_block = [*_blocks(heads, block_area), *_blocks(tails, block_area)]
    return Sequence(
        input_ids=input_ids[row, positions],
        positions=positions,
        blocks=[_block(runs) for runs in of_block],
        attended=_attended(of_block, len(row)),
        places=places,
        predicting=places[completion - 1],
        targets=input_ids[row_of[completion], place[completion]],
    )


def _counted(lengths: Ints) -> tuple[Ints, Ints]:
    """Return the index of each element's part and its place within it, for parts of these lengths in a row."""
    part = np.repeat(np.arange(len(lengths)), lengths)
    return part, np.arange(len(part)) - (lengths.cumsum() - lengths)[part]


def _blocks(runs: Runs, block_area: int) -> Iterator[Runs]:
    """Yield all runs as one block if it is small; otherwise blocks of equal prompts and at least half full."""
    if len(runs) == 0:
        return
    longest, prompt = int(runs.length.max()), int(runs.prompt_length.max())
    if len(runs) * longest * (prompt + longest) <= block_area:
        yield runs
        return
    runs = runs[np.lexsort((runs.start, -runs.length, runs.prompt_length))]
    sizes = list(zip(runs.prompt_length.tolist(), runs.length.tolist(), strict=True))
    first = 0
    for number, (prompt, length) in enumerate(sizes):
        if prompt != sizes[first][0] or 2 * length < sizes[first][1]:
            yield runs[first:number]
            first = number
    yield runs[first:]


def _block(runs: Runs) -> Block:
    starts, lengths = runs.start[:, None], runs.length[:, None]
    prompt_starts, prompts = runs.prompt_start[:, None], runs.prompt_length[:, None]
    own, context = np.arange(lengths.max()), np.arange(prompts.max())
    # Padding repeats the first token of a run: its output is dropped, and as a key only other padding attends to it.
    queries = starts + np.where(own < lengths, own, 0)
    keys = np.concatenate([prompt_starts + np.where(context < prompts, context, 0), queries], axis=1)
    if (prompts == prompts[0]).all():
        return Block(queries, keys, None)
    mask = np.zeros((len(runs), 1, len(own), keys.shape[1]), np.bool_)
    mask[..., : len(context)] = (context < prompts)[:, None, None]
    mask[..., len(context) :] = own <= own[:, None]
    return Block(queries, keys, mask)


def _attended(of_block: list[Runs], end: int) -> Ints:
    attended, base = np.zeros(end, np.int64), 0
    for runs in of_block:
        width = int(runs.length.max())
        run, place = _counted(runs.length)
        attended[runs.start[run] + place] = base + run * width + place
        base += len(runs) * width
    return attended
