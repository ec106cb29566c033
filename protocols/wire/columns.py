"""What stages made of many groups, as one ragged float32 frame a column: encoded, checked and cut as a whole.

``joined`` is the shard's side, ``parted`` the reader's. Whether a group's share is as long as the group says is seen by
``GroupPayload.add``.
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


def joined(made: Sequence[Mapping[str, Array]]) -> tuple[list[MadeColumn], list[memoryview]]:
    """The columns of these groups, float32, in the order in which their names come, and a frame of each."""
    columns: list[MadeColumn] = []
    frames: list[memoryview] = []
    for name in dict.fromkeys(name for group in made for name in group):
        shares = [group.get(name) for group in made]
        columns.append(MadeColumn(name=name, counts=[0 if share is None else len(share) for share in shares]))
        frames.append(np.concatenate([share for share in shares if share is not None], dtype=_FLOAT).data.cast("B"))
    return columns, frames


def parted(columns: Sequence[MadeColumn], frames: Sequence[Data], groups: int) -> list[dict[str, Array]]:
    """The columns of each of so many groups, as views, their values checked. ``ProtocolError`` when frames and headers
    disagree, or a value is none that the column may hold."""
    made: list[dict[str, Array]] = [{} for _ in range(groups)]
    if len(frames) < len(columns):
        raise _malformed(f"{len(columns)} columns are announced, {len(frames)} frames came")
    for column, frame in zip(columns, frames, strict=False):
        name, counts, nbytes = column.name, column.counts, memoryview(frame).nbytes
        if len(counts) != groups or nbytes != sum(counts) * _FLOAT.itemsize:
            raise _malformed(f"{name} has {nbytes} bytes for {counts} values of {groups} groups")
        values: Array = np.frombuffer(frame, _FLOAT) if nbytes else np.empty(0, _FLOAT)
        check_values(name, values)
        for found, (start, end) in zip(made, pairwise(accumulate(counts, initial=0)), strict=True):
            if start < end:
                found[name] = values[start:end]
    return made


def _malformed(detail: str) -> ProtocolError:
    return ProtocolError(Code.MALFORMED, detail)
