"""The running batch as columns: one row per trajectory, rows ``0 .. size - 1`` in use, always without holes.

Rows from the end fill the rows that are freed; ``RowMoves`` reports these moves so that owners of further columns (a KV
cache) can repeat them. NumPy only; both embedded engines build on this module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import Request, TokenSegment, Trajectory, VersionMarks, prefix_tokens
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish
from staleflow.protocols.wire.typed_columns import TypedColumn

# The odd 64-bit constant of splitmix64, 2^64 divided by the golden ratio.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class RowMoves:
    """Rows that moved: the content of ``sources[i]`` is now in ``targets[i]``; no row is in both."""

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]


class RunningBatch:
    """Up to ``slots`` trajectories that are being generated. ``columns``: those that the engine makes a token."""

    def __init__(self, slots: int, columns: Sequence[TypedColumn] = ()) -> None:
        self.slots = slots
        self.size = 0
        self.position = np.zeros(slots, np.int64)
        """Position of the last token written, which is also the number of tokens in the row's KV cache."""
        self.last = np.zeros(slots, np.int64)
        """The last token written, which the next step reads."""
        self.count = np.zeros(slots, np.int64)
        """Number of generated tokens, prefix included."""
        self.limit = np.zeros(slots, np.int64)
        self.interrupted = np.zeros(slots, np.bool_)
        self.stopped = np.zeros(slots, np.bool_)
        """True for rows whose text contains one of their stop strings."""
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.min_p = np.zeros(slots, np.float32)
        self.repetition_penalty = np.ones(slots, np.float32)
        self.frequency_penalty = np.zeros(slots, np.float32)
        self.presence_penalty = np.zeros(slots, np.float32)
        self.seed = np.zeros(slots, np.uint64)
        self.token_ids = np.zeros((slots, 64), np.int32)
        self.logprobs = np.zeros((slots, 64), np.float32)
        self.columns = {
            column.name: np.zeros((slots, 64, *(column.shape or ())), column.array_dtype) for column in columns
        }
        self.requests: list[Request] = []
        self.marks: list[VersionMarks] = []
        self._row_of: dict[int, int] = {}

    def __contains__(self, request: int) -> bool:
        return request in self._row_of

    def join(self, request: Request, limit: int, lineage: Lineage, version: Version) -> int:
        """Assign a row to a request; ``write`` adds its first token. ``limit`` includes the prefix."""
        row = self.size
        self.size += 1
        self._row_of[request.id] = row
        self._widen(limit)
        token_ids, logprobs = prefix_tokens(request.prefix)
        written = len(token_ids)
        self.token_ids[row, :written] = token_ids
        self.logprobs[row, :written] = logprobs
        for name, column in self.columns.items():
            if written:
                column[row, :written] = np.concatenate([segment.columns[name] for segment in request.prefix])
        self.position[row] = len(request.prompt_ids) + written - 1
        self.count[row] = written
        self.limit[row] = limit
        self.interrupted[row] = self.stopped[row] = False
        self.temperature[row] = request.sampling.temperature
        self.top_p[row] = request.sampling.top_p
        self.top_k[row] = request.sampling.top_k
        self.min_p[row] = request.sampling.min_p
        self.repetition_penalty[row] = request.sampling.repetition_penalty
        self.frequency_penalty[row] = request.sampling.frequency_penalty
        self.presence_penalty[row] = request.sampling.presence_penalty
        self.seed[row] = request.seed & 0xFFFFFFFFFFFFFFFF
        self.requests.append(request)
        marks = VersionMarks()
        start = 0
        for segment in request.prefix:
            marks.turn(segment.lineage, segment.version, start)
            start += len(segment.token_ids)
        marks.turn(lineage, version, written)
        self.marks.append(marks)
        return row

    def turn(self, lineage: Lineage, version: Version) -> None:
        """Attribute all later tokens to this version."""
        for marks, written in zip(self.marks, self.count.tolist(), strict=False):
            marks.turn(lineage, version, written)

    def write(
        self,
        first: int,
        end: int,
        token_ids: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        columns: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Append one token, with its value of each column, to each of the rows ``first .. end - 1``."""
        rows = slice(first, end)
        at = np.arange(first, end), self.count[rows]
        self.token_ids[at] = token_ids
        self.logprobs[at] = logprobs
        for name, values in (columns or {}).items():
            self.columns[name][at] = values
        self.last[rows] = token_ids
        self.count[rows] += 1
        self.position[rows] += 1

    def finished(self, stop_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows that ended: by a stop token or string, the limit, or an interrupt after a token."""
        size = self.size
        ended = (self.count[:size] >= self.limit[:size]) | self.stopped[:size]
        ended |= self.interrupted[:size] & (self.count[:size] > 0)
        for stop in stop_ids:
            ended |= (self.last[:size] == stop) & (self.count[:size] > 0)
        return np.flatnonzero(ended)

    def take(self, row: int, stop_ids: NDArray[np.int64]) -> Trajectory:
        """Return the trajectory in a row as it stands."""
        count = int(self.count[row])
        if self.last[row] in stop_ids or self.stopped[row]:
            finish = Finish.STOP
        elif count >= self.limit[row]:
            finish = Finish.LENGTH
        else:
            finish = Finish.INTERRUPTED
        return Trajectory(id=self.requests[row].id, segments=self.segments(row), finish=finish)

    def segments(self, row: int) -> tuple[TokenSegment, ...]:
        """Return the tokens in a row."""
        written = slice(int(self.count[row]))
        columns = {name: column[row, written] for name, column in self.columns.items()}
        return self.marks[row].cut(self.token_ids[row, written], self.logprobs[row, written], columns)

    def leave(self, rows: NDArray[np.int64]) -> RowMoves:
        """Free these rows (ascending) and close the holes."""
        size = self.size - len(rows)
        staying = np.ones(self.size - size, np.bool_)
        staying[rows[rows >= size] - size] = False
        sources = np.flatnonzero(staying) + size
        targets = rows[rows < size]
        for row in map(int, rows):
            del self._row_of[self.requests[row].id]
        for source, target in zip(map(int, sources), map(int, targets), strict=True):
            # Rows move only from beyond the new size into freed rows below it, so sources and targets never overlap.
            self.requests[target] = self.requests[source]
            self.marks[target] = self.marks[source]
            self._row_of[self.requests[target].id] = target
        for column in (
            self.position, self.last, self.count, self.limit, self.interrupted, self.stopped, self.temperature,
            self.top_p, self.top_k, self.min_p, self.repetition_penalty, self.frequency_penalty, self.presence_penalty,
            self.seed, self.token_ids, self.logprobs, *self.columns.values(),
        ):  # fmt: skip
            column[targets] = column[sources]
        del self.requests[size:], self.marks[size:]
        self.size = size
        return RowMoves(sources, targets)

    def interrupt(self, request: int) -> None:
        self.interrupted[self._row_of[request]] = True

    def row(self, request: int) -> int | None:
        return self._row_of.get(request)

    def _widen(self, width: int) -> None:
        have = self.token_ids.shape[1]
        if width > have:
            pad = ((0, 0), (0, max(width, 2 * have) - have))
            self.token_ids = np.pad(self.token_ids, pad)
            self.logprobs = np.pad(self.logprobs, pad)
            for name, column in self.columns.items():
                self.columns[name] = np.pad(column, (*pad, *((0, 0),) * (column.ndim - 2)))


def uniforms(seed: NDArray[np.uint64], count: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return one number in [0, 1) per row, from its seed and token count: splitmix64 (Steele et al. 2014).

    The numbers have 23 bits, so that ``u * x < x`` also holds in float32.
    """
    mixed = seed * GOLDEN
    mixed = _mix(mixed ^ (mixed >> np.uint64(31))) + (count.astype(np.uint64) + np.uint64(1)) * GOLDEN
    return (_mix(mixed) >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
