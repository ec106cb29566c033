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
class Run:
    """Consecutive tokens of the sequence, and the prompt before them (length 0 for a run without one)."""

    start: int
    length: int
    prompt_start: int = 0
    prompt_length: int = 0


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
    shared = np.zeros(len(groups), np.int64)
    for group in np.unique(groups):
        (rows,) = np.nonzero(groups == group)
        if len(rows) > 1:
            width = int(prompts[rows].min())
            equal = (input_ids[rows, :width] == input_ids[rows[0], :width]).all(axis=0)
            shared[rows] = width if equal.all() else int(equal.argmin())
    return shared


def lay_out(
    input_ids: Ints, lengths: Ints, prompts: Ints, groups: Ints, *, block_area: int = BLOCK_AREA, unshared: int = 0
) -> Sequence:
    """Return the sequence of a pass over rows of these lengths, prompt lengths and groups.

    ``unshared``: number of tokens at the end of each prompt that are not shared.
    """
    shared = shared_prefixes(input_ids, prompts - unshared, groups)
    heads, tails = list[Run](), list[Run]()
    ids, positions, places = list[Ints](), list[Ints](), list[Ints]()
    prompt_of: dict[int, Run] = {}
    end = 0

    def append(row: int, first: int, last: int) -> Ints:
        nonlocal end
        ids.append(input_ids[row, first:last])
        positions.append(np.arange(first, last))
        end += last - first
        return np.arange(end - (last - first), end)

    for row, (group, length, prefix) in enumerate(zip(groups.tolist(), lengths.tolist(), shared.tolist(), strict=True)):
        if prefix == 0:
            heads.append(Run(end, length))
            places.append(append(row, 0, length))
            continue
        if group not in prompt_of:
            prompt_of[group] = Run(end, prefix)
            heads.append(prompt_of[group])
            append(row, 0, prefix)
        prompt = prompt_of[group]
        if length > prefix:
            tails.append(Run(end, length - prefix, prompt.start, prefix))
        places.append(np.concatenate([prompt.start + np.arange(prefix), append(row, prefix, length)]))
    of_block = [*_blocks(heads, block_area), *_blocks(tails, block_area)]
    sizes = list(zip(lengths.tolist(), prompts.tolist(), strict=True))
    return Sequence(
        input_ids=np.concatenate(ids),
        positions=np.concatenate(positions),
        blocks=[_block(runs) for runs in of_block],
        attended=_attended(of_block, end),
        places=np.concatenate(places),
        predicting=np.concatenate(
            [place[prompt - 1 : length - 1] for place, (length, prompt) in zip(places, sizes, strict=True)]
        ),
        targets=np.concatenate([input_ids[row, prompt:length] for row, (length, prompt) in enumerate(sizes)]),
    )


def _blocks(runs: list[Run], block_area: int) -> Iterator[list[Run]]:
    """Yield all runs as one block if it is small; otherwise blocks of equal prompts and at least half full."""
    longest, prompt = (max((getattr(run, key) for run in runs), default=0) for key in ("length", "prompt_length"))
    if len(runs) * longest * (prompt + longest) <= block_area:
        if runs:
            yield runs
        return
    block: list[Run] = []
    for run in sorted(runs, key=lambda run: (run.prompt_length, -run.length, run.start)):
        if block and (run.prompt_length != block[0].prompt_length or 2 * run.length < block[0].length):
            yield block
            block = []
        block.append(run)
    yield block


def _block(runs: list[Run]) -> Block:
    starts, lengths, prompt_starts, prompts = (
        np.array([getattr(run, key) for run in runs], np.int64)[:, None]
        for key in ("start", "length", "prompt_start", "prompt_length")
    )
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


def _attended(of_block: list[list[Run]], end: int) -> Ints:
    attended, base = np.zeros(end, np.int64), 0
    for runs in of_block:
        width = max(run.length for run in runs)
        for number, run in enumerate(runs):
            attended[run.start : run.start + run.length] = base + number * width + np.arange(run.length)
        base += len(runs) * width
    return attended
