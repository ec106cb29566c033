"""The payload of one group: the tokens of its samples, the version that wrote each token, and its log-probability.

Columnar and ragged: ``n`` samples of one prompt, their completions one after another, ``T`` tokens in all. A payload
must pass ``check`` before any other use; ``from_arrays`` calls it.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, Lineage, Segment, Version
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.stages import LOGPROB_TOLERANCE, STAGE, Column, Kind, column_of
from staleflow.protocols.wire.tensors import Array
from staleflow.protocols.wire.typed_columns import PREFIXES


class Finish(IntEnum):
    """Reason why a sample ended."""

    STOP = 0
    LENGTH = 1
    INTERRUPTED = 2


_COLUMNS: Final[dict[str, "tuple[np.dtype[Any], int]"]] = {
    "prompt_ids": (np.dtype("int32"), 1),
    "lengths": (np.dtype("int32"), 1),
    "token_ids": (np.dtype("int32"), 1),
    "logprobs": (np.dtype("float32"), 1),
    "loss_mask": (np.dtype("uint8"), 1),
    "segments": (np.dtype("int64"), 2),
    "finish": (np.dtype("uint8"), 1),
}
"""Dtype and number of dimensions of each column, by name."""

_FLOAT: Final = np.dtype("float32")
_LAST_FINISH: Final = max(Finish)
_MAX_ROWS: Final = 65_536
"""Maximum number of samples of a group, and of segments of all its samples: they are checked one by one."""
_FEW: Final = 32
"""Number of values up to which plain Python is faster than NumPy."""
# Array methods such as ``min`` reach the same ufuncs through Python, which takes longer than the reduction itself for a
# group of a few thousand tokens.
_least, _most = np.minimum.reduce, np.maximum.reduce


@dataclass(slots=True, kw_only=True, eq=False)
class GroupPayload:
    """One group. Construction checks nothing: call ``check`` before sending, and ``from_arrays`` on receipt."""

    prompt_ids: Array
    """int32 [P]"""
    lengths: Array
    """int32 [n]: completion tokens of each sample."""
    token_ids: Array
    """int32 [T]: all completions, sample after sample."""
    logprobs: Array
    """float32 [T]: log-probability of each token in the distribution that the engine sampled from."""
    loss_mask: Array
    """uint8 [T]: 1 for tokens written by the policy, 0 for tokens written by the environment."""
    segments: Array
    """int64 [S, 4]: rows (sample, lineage, version, tokens), sample after sample, in order of writing."""
    finish: Array
    """uint8 [n]: ``Finish`` of each sample."""
    stages: dict[str, Array] = field(default_factory=dict[str, Array])
    """Stage columns by full name, float32: ``stage/reward/reward`` [n], ``stage/reference/logprobs`` [T]
    (``wire.stages``)."""
    columns: dict[str, Array] = field(default_factory=dict[str, Array])
    """Arrays of the columns that the configuration declares (``wire.typed_columns``). ``check`` ignores them:
    ``PayloadLimits`` compares them with the declaration."""

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def to_arrays(self) -> dict[str, Array]:
        """Return all arrays by name, after ``check``: a payload that every receiver would refuse raises here."""
        self.check()
        return {name: getattr(self, name) for name in _COLUMNS} | self.stages | self.columns

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "GroupPayload":
        """Return a checked payload. ``ProtocolError`` names the first problem."""
        own: dict[str, Array] = {}
        stages: dict[str, Array] = {}
        typed: dict[str, Array] = {}
        for name, array in arrays.items():
            (own if name in _COLUMNS else typed if name.startswith(PREFIXES) else stages)[name] = array
        if len(own) < len(_COLUMNS):
            raise _malformed(f"the payload lacks {', '.join([name for name in _COLUMNS if name not in own])}")
        if unknown := [name for name in stages if not name.startswith(STAGE)]:
            raise _malformed(f"the payload has unknown columns: {', '.join(unknown)}")
        payload = cls(**own, stages=stages, columns=typed)
        payload.check()
        return payload

    def add(self, columns: Mapping[str, Array]) -> None:
        """Add stage columns whose values are already checked. Raises ``ProtocolError`` for a column of wrong length."""
        for name, column in columns.items():
            kind = _column(name).kind
            wanted = self.num_tokens if kind is Kind.TOKEN else self.num_samples
            if len(column) != wanted:
                raise _malformed(f"{name} holds {len(column)} values; it must hold {wanted}, one a {kind}")
        self.stages |= columns

    def check(self) -> None:
        """Raise ``ProtocolError`` unless types, sizes and ranges are valid and segments add up to the tokens."""
        for name, (dtype, ndim) in _COLUMNS.items():
            _check_type(name, getattr(self, name), dtype, ndim)
        self._check_sizes()
        self._check_values()
        _check_segments(self.segments, self.lengths)
        for name, column in self.stages.items():
            check_column(name, column, samples=self.num_samples, tokens=self.num_tokens)

    def segment_summary(self) -> list[Segment]:
        """Return the tokens written by the policy, by (lineage, version), ascending, summed over all samples.

        Segments also cover tokens of an environment. Those are never trained: the ledger, its bound and its counts
        include sampled tokens only.
        """
        totals: dict[tuple[int, int], int] = {}
        rows: list[list[int]] = self.segments.tolist()
        for (_, lineage, version, _), tokens in zip(rows, self._sampled(self.segments[:, 3]), strict=True):
            if tokens:
                totals[lineage, version] = totals.get((lineage, version), 0) + tokens
        return [Segment(Lineage(key[0]), Version(key[1]), totals[key]) for key in sorted(totals)]

    def token_versions(self) -> Array:
        """Return the version that wrote each token, int64 [T]."""
        return np.repeat(self.segments[:, 2], self.segments[:, 3])

    def sampled_lengths(self) -> list[int]:
        """Return the number of tokens of each sample that the policy wrote."""
        return self._sampled(self.lengths)

    def all_sampled(self) -> bool:
        """Return True if the policy wrote all tokens and no environment wrote any."""
        return bool(np.minimum.reduce(self.loss_mask, initial=1))

    def _sampled(self, tokens: Array) -> list[int]:
        """Return the number of sampled tokens in each of the consecutive stretches of ``tokens`` tokens."""
        if not self.all_sampled():
            before = np.concatenate(([0], np.cumsum(self.loss_mask, dtype=np.int64)))
            tokens = np.diff(before[np.cumsum(tokens)], prepend=0)
        counts: list[int] = tokens.tolist()
        return counts

    def _check_sizes(self) -> None:
        if not 0 < len(self.lengths) <= _MAX_ROWS:
            raise _malformed(f"lengths holds {len(self.lengths)} values; a group has 1 to {_MAX_ROWS} samples")
        lengths: list[int] = self.lengths.tolist()
        samples, tokens = len(lengths), sum(lengths)
        if (least := min(lengths)) < 0:
            raise _malformed(f"lengths holds {least}; a completion has no fewer than 0 tokens")
        for name, wanted in (("token_ids", tokens), ("logprobs", tokens), ("loss_mask", tokens), ("finish", samples)):
            if (size := len(getattr(self, name))) != wanted:
                raise _malformed(f"{name} holds {size} values; the lengths of {samples} samples ask for {wanted}")

    def _check_values(self) -> None:
        for name in ("prompt_ids", "token_ids"):
            if (least := int(_least(getattr(self, name), initial=0))) < 0:
                raise _malformed(f"{name} holds {least}; a token id is at least 0")
        if not float(_least(self.logprobs, initial=0)) > -np.inf:  # NaN or -inf
            raise _malformed("logprobs holds a value that is not finite")
        if (most := float(_most(self.logprobs, initial=-np.inf))) > LOGPROB_TOLERANCE:
            raise _malformed(f"logprobs holds {most}; a log-probability is at most 0")
        if (most := int(_most(self.loss_mask, initial=0))) > 1:
            raise _malformed(f"loss_mask holds {most}; it is 0 or 1")
        if (most := max(self.finish.tolist())) > _LAST_FINISH:
            raise _malformed(f"finish holds {most}; it is one of {[int(value) for value in Finish]}")


def made_columns(
    stage: str, named: Mapping[str, Array], *, makes: Collection[str], samples: int, tokens: int
) -> dict[str, Array]:
    """Return the columns that ``stage`` made, by full name.

    Columns may have their short or their full name; ``makes`` are the full names of the required columns.
    ``ProtocolError`` names the first column that is missing, unexpected or wrong.
    """
    prefix = f"{STAGE}{stage}/"
    columns = {name if name.startswith(prefix) else prefix + name: array for name, array in named.items()}
    for name in makes:
        if name not in columns:
            raise _malformed(f"the stage must make {name}")
    for name, array in columns.items():
        if name not in makes:
            raise _malformed(f"the stage makes {name}, which is not one of {', '.join(makes)}")
        check_column(name, array, samples=samples, tokens=tokens)
    return columns


def check_column(name: str, array: Array, *, samples: int, tokens: int) -> None:
    """Raise ``ProtocolError`` unless ``array`` is a valid column ``name`` of a group of this size."""
    column = _column(name)
    wanted = tokens if column.kind is Kind.TOKEN else samples
    if array.dtype != _FLOAT or array.shape != (wanted,):
        detail = f"{name} is {array.dtype}{list(array.shape)}; it must be float32[{wanted}], one value a {column.kind}"
        raise _malformed(detail)
    check_values(name, array)


def check_values(name: str, array: Array) -> None:
    """Raise ``ProtocolError`` unless the column ``name`` may hold these values, of one group or of many."""
    if array.size <= _FEW:
        values: list[float] = array.tolist()
        finite, most = all(map(math.isfinite, values)), max(values, default=-math.inf)
    else:
        most = float(_most(array, initial=-math.inf))
        finite = float(_least(array, initial=0)) > -math.inf and most < math.inf  # NaN is neither
    if not finite:
        raise _malformed(f"{name} holds a value that is not finite")
    if most > column_of(name).most:
        raise _malformed(f"{name} holds {most}; a log-probability is at most 0")


def _column(name: str) -> Column:
    """Return kind and bound of a column. Raises ``ProtocolError`` if the name is not a column's."""
    if len(parts := name.split("/")) != 3 or parts[0] != "stage" or not all(parts):
        raise _malformed(f"{name!r} is no column; its name must be stage/<stage>/<column>")
    return column_of(name)


def shard_of(group: GroupId, shards: int) -> int:
    """Return the trajectory server that stores ``group``.

    The result is the same in every process and release (splitmix64, then modulo): stored groups depend on it.
    """
    mask = 0xFFFF_FFFF_FFFF_FFFF
    mixed = (group + 0x9E37_79B9_7F4A_7C15) & mask
    mixed = ((mixed ^ mixed >> 30) * 0xBF58_476D_1CE4_E5B9) & mask
    mixed = ((mixed ^ mixed >> 27) * 0x94D0_49BB_1331_11EB) & mask
    return (mixed ^ mixed >> 31) % shards


def _check_type(name: str, array: Array, dtype: "np.dtype[Any]", ndim: int) -> None:
    if array.dtype != dtype or array.ndim != ndim:
        raise _malformed(f"{name} is {array.dtype} with {array.ndim} dimensions; it must be {dtype} with {ndim}")


def _check_segments(segments: Array, lengths: Array) -> None:
    if segments.shape[1] != 4:
        raise _malformed(f"segments has {segments.shape[1]} columns; a row is sample, lineage, version, tokens")
    if len(segments) > _MAX_ROWS:
        raise _malformed(f"segments has {len(segments)} rows; a group has at most {_MAX_ROWS}")
    wanted: list[int] = lengths.tolist()
    longest, written, last = max(wanted), [0] * len(wanted), (0, 0, 0)
    rows: list[list[int]] = segments.tolist()
    for row, (sample, lineage, version, tokens) in enumerate(rows):
        if not 0 <= sample < len(wanted) or lineage < 0 or version < 0 or tokens < 1:
            raise _malformed(
                f"segments names a sample that does not exist, or has a negative number or an empty segment: row {row}"
            )
        if tokens > longest:
            raise _malformed(f"segments holds one of {tokens} tokens; the longest sample has {longest}")
        if (current := (sample, lineage, version)) < last:
            raise _malformed(f"segments goes back in row {row}: sample, lineage and version must ascend")
        written[sample] += tokens
        last = current
    if written != wanted:
        sample = next(sample for sample, tokens in enumerate(wanted) if written[sample] != tokens)
        raise _malformed(f"the segments of sample {sample} add up to {written[sample]} tokens, it has {wanted[sample]}")


def _malformed(detail: str) -> ProtocolError:
    return ProtocolError(Code.MALFORMED, detail)
