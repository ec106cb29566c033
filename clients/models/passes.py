"""Split trajectories into passes through a model: padded, packed without padding, or with shared prompts."""

import math

import numpy as np
from numpy.typing import NDArray


def packed_passes(lengths: NDArray[np.int64], micro_tokens: int) -> list[NDArray[np.int64]]:
    """Return the rows of each pass: as few passes as possible, of about equal size, none above ``micro_tokens``.

    A longer row forms its own pass. The longest row goes first, into the emptiest pass; depends only on the lengths.
    """
    if len(lengths) == 0:
        return []
    order = np.argsort(-lengths, kind="stable").tolist()
    alone = [row for row in order if lengths[row] > micro_tokens]
    rest = order[len(alone) :]
    passes = math.ceil(int(lengths[rest].sum()) / micro_tokens) if rest else 0
    while (cut := _cut(lengths, rest, passes, micro_tokens)) is None:
        passes += 1
    return [*[np.array([row], np.int64) for row in alone], *cut]


def _cut(
    lengths: NDArray[np.int64], order: list[int], passes: int, micro_tokens: int
) -> list[NDArray[np.int64]] | None:
    """Distribute the rows over ``passes`` passes; return None if one would be too large."""
    loads, rows = [0] * passes, [list[int]() for _ in range(passes)]
    for row in order:
        place = min(range(passes), key=lambda place: (loads[place], place))
        loads[place] += int(lengths[row])
        rows[place].append(row)
        if loads[place] > micro_tokens:
            return None
    return [np.array(sorted(part), np.int64) for part in rows if part]


def padded_passes(lengths: NDArray[np.int64], micro_tokens: int) -> list[NDArray[np.int64]]:
    """Return the rows of each padded pass: longest first, as many as fit ``micro_tokens`` after padding to the longest.

    A longer row forms its own pass. The result depends only on the lengths; equal lengths keep their order.
    """
    order = np.argsort(-lengths, kind="stable")
    cuts: list[NDArray[np.int64]] = []
    start = 0
    while start < len(order):
        fits = max(1, micro_tokens // max(1, int(lengths[order[start]])))
        cuts.append(order[start : start + fits])
        start += fits
    return cuts


def shared_passes(
    lengths: NDArray[np.int64], shared: NDArray[np.int64], groups: NDArray[np.int64], micro_tokens: int
) -> list[NDArray[np.int64]]:
    """Return the rows of each pass as ``packed_passes``, where the rows of a group compute ``shared`` tokens only once.

    A group stays together if it fits ``micro_tokens``; otherwise it is split, and each part computes its prompt.
    """
    units: list[NDArray[np.int64]] = []
    costs: list[int] = []
    for group in np.unique(groups):
        (rows,) = np.nonzero(groups == group)
        prompt, rests = int(shared[rows[0]]), lengths[rows] - shared[rows]
        whole = prompt + int(rests.sum()) <= micro_tokens
        split = [np.arange(len(rows))] if whole else packed_passes(np.maximum(rests, 1), max(1, micro_tokens - prompt))
        for part in split:
            units.append(rows[part])
            costs.append(prompt + int(rests[part].sum()))
    cuts = packed_passes(np.array(costs, np.int64), micro_tokens)
    return [np.concatenate([units[int(unit)] for unit in cut]) for cut in cuts]


def computed(lengths: NDArray[np.int64], shared: NDArray[np.int64], groups: NDArray[np.int64]) -> tuple[int, int]:
    """Return the number of tokens of a pass, and the number of its pairs of query and key times two.

    Without shared tokens these are the sums of the lengths and of their squares.
    """
    first: NDArray[np.intp] = np.unique(groups, return_index=True)[1]
    repeated = shared.copy()
    repeated[first] = 0
    return int((lengths - repeated).sum()), int((lengths**2 - repeated**2).sum())
