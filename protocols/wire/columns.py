"""Stage columns of many groups, as one ragged float32 frame a column.

The shard calls ``join_columns``, the reader ``split_columns``. ``GroupPayload.add`` checks that a group's share has the
length of the group.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.messages import MadeColumn
from staleflow.protocols.wire.tensors import Array
from staleflow.protocols.wire.trajectory import check_values

_FLOAT: Final = np.dtype("<f4")


def join_columns(groups: Sequence[Mapping[str, Array]]) -> tuple[list[MadeColumn], list[memoryview]]:
    """Return the columns of these groups, in order of the first occurrence of their names, and a float32 frame each."""
    columns: list[MadeColumn] = []
    frames: list[memoryview] = []
    for name in dict.fromkeys(name for group in groups for name in group):
        shares = [group.get(name) for group in groups]
        columns.append(MadeColumn(name=name, counts=[0 if share is None else len(share) for share in shares]))
        frames.append(np.concatenate([share for share in shares if share is not None], dtype=_FLOAT).data.cast("B"))
    return columns, frames


def split_columns(columns: Sequence[MadeColumn], frames: Sequence[Data], groups: int) -> list[dict[str, Array]]:
    """Return the columns of each of the ``groups`` groups, as views with checked values.

    Raises ``ProtocolError`` if frames and headers disagree or a value is not allowed in its column.
    """
    split: list[dict[str, Array]] = [{} for _ in range(groups)]
    if len(frames) < len(columns):
        raise _malformed(f"{len(columns)} columns are announced, {len(frames)} frames came")
    for column, frame in zip(columns, frames, strict=False):
        name, counts, nbytes = column.name, column.counts, memoryview(frame).nbytes
        if len(counts) != groups or nbytes != sum(counts) * _FLOAT.itemsize:
            raise _malformed(f"{name} has {nbytes} bytes for {counts} values of {groups} groups")
        values: Array = np.frombuffer(frame, _FLOAT) if nbytes else np.empty(0, _FLOAT)
        check_values(name, values)
        for group, (start, end) in zip(split, pairwise(accumulate(counts, initial=0)), strict=True):
            if start < end:
                group[name] = values[start:end]
    return split


def _malformed(detail: str) -> ProtocolError:
    return ProtocolError(Code.MALFORMED, detail)
