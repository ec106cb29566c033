"""Typed columns that a rollout worker pushes with a group, as the configuration declares them (``[[column]]``).

A column of one value a token is the array ``token/NAME`` [T, *shape]: T completion tokens in the order of
``token_ids``, without the prompt. A column of one value a sample is ``sample/NAME`` [n, *shape]. Byte strings are
``sample/NAME`` uint8, one string after another, and ``sample/NAME:sizes`` int64 [n].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Final, Literal, cast

import numpy as np

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.tensors import Array

TOKEN: Final = "token/"
SAMPLE: Final = "sample/"
SIZES: Final = ":sizes"
"""Suffix of the array with the size of each byte string."""
PREFIXES: Final = (TOKEN, SAMPLE)

Dtype = Literal["int8", "uint8", "uint16", "int32", "int64", "float16", "float32", "bytes"]

OPEN_DTYPES: Final = ("uint8", "uint16")
"""Dtypes of a column whose shape is open."""
OPEN_DIMENSIONS: Final = 2
"""Dimensions of one value of such a column."""

MAX_COLUMNS: Final = 16
MAX_TOKEN_BYTES: Final = 64 << 10
"""Maximum size of one token's value."""
MAX_SAMPLE_BYTES: Final = 16 << 20
"""Maximum size of one sample's value."""

_SIZES: Final = np.dtype("int64")
_BYTES: Final = np.dtype("uint8")


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedColumn:
    """One declared column."""

    name: str
    per: Literal["token", "sample"]
    dtype: Dtype
    shape: tuple[int, ...] | None = ()
    """Dimensions of one value; () is a scalar. None, for a token's value only: two dimensions and a dtype of
    ``OPEN_DTYPES``, which the worker chooses for each group."""
    max_bytes: int = MAX_SAMPLE_BYTES
    """Maximum size of one byte string."""
    required: bool = True
    """A push without the column is refused. Otherwise its values are 0, or empty, at the trainer."""

    @property
    def key(self) -> str:
        """Name of the column's array in a payload."""
        return (TOKEN if self.per == "token" else SAMPLE) + self.name

    @property
    def sizes_key(self) -> str:
        return self.key + SIZES

    @property
    def is_bytes(self) -> bool:
        return self.dtype == "bytes"

    @property
    def array_dtype(self) -> "np.dtype[Any]":
        return _BYTES if self.is_bytes else np.dtype(self.dtype)

    @property
    def value_bytes(self) -> int:
        """Size of one value, or the maximum size of a byte string."""
        return self.max_bytes if self.is_bytes else self.array_dtype.itemsize * prod(self.shape or ())

    def __str__(self) -> str:
        if self.shape is None:
            return f"{' or '.join(OPEN_DTYPES)}[*, *]"
        return "bytes" if self.is_bytes else f"{self.dtype}{list(self.shape) if self.shape else ''}"

    def fitted(self, given: Any) -> "TypedColumn":
        """Return the column with dtype and dimensions of an array [tokens, *shape], if they are open and allowed."""
        if self.shape is not None or not isinstance(given, np.ndarray):
            return self
        array = cast(Array, given)
        if array.ndim != 1 + OPEN_DIMENSIONS or array.dtype.name not in OPEN_DTYPES:
            return self
        return replace(self, dtype=cast(Dtype, array.dtype.name), shape=array.shape[1:])

    def encode(self, values: Sequence[Any]) -> dict[str, Array]:
        """Return the arrays of the column, from the checked values of the samples in order."""
        if self.is_bytes:
            sizes = np.array([len(value) for value in values], _SIZES)
            return {self.key: np.frombuffer(b"".join(values), _BYTES), self.sizes_key: sizes}
        if self.per == "token":
            return {self.key: np.concatenate(values, dtype=self.array_dtype)}
        return {self.key: np.stack(values).astype(self.array_dtype, copy=False)}

    def split(self, arrays: Mapping[str, Array], lengths: Sequence[int]) -> list[Any]:
        """Return the values of the samples, of ``lengths`` tokens each, in order: the inverse of ``encode``."""
        array = arrays[self.key]
        if self.is_bytes:
            return list(byte_strings(array, arrays[self.sizes_key]))
        if self.per == "sample":
            return list(array)
        return [array[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]

    def empty(self, tokens: int) -> Any:
        """Return the value of a sample that has none yet, or that comes without the column."""
        if self.is_bytes:
            return b""
        shape = (0, 0) if self.shape is None else self.shape
        return np.zeros((tokens, *shape) if self.per == "token" else shape, self.array_dtype)

    def value(self, given: Any, tokens: int) -> Any:
        """Return one sample's value as an array, or as bytes. Raises ``ValueError`` with the expected and given type.

        Lists of Python numbers are converted if the dtype can represent each of them. Arrays must have the dtype.
        """
        if self.is_bytes:
            if not isinstance(given, bytes | bytearray | memoryview):
                raise ValueError(f"it must be bytes, got {type(given).__name__}")
            data = bytes(cast(Data, given))
            if len(data) > self.max_bytes:
                raise ValueError(f"it must have at most {self.max_bytes} bytes (max_bytes), got {len(data)}")
            return data
        unit = ", one value a token" if self.per == "token" else ""
        if self.shape is None:
            got = f"{given.dtype}{list(given.shape)}" if hasattr(given, "dtype") else type(given).__name__
            raise ValueError(f"it must be an array {self}{unit}, got {got}")
        shape = (tokens, *self.shape) if self.per == "token" else self.shape
        expected = f"it must be {self.dtype}{list(shape)}{unit}"
        try:
            array = np.asarray(given)
            if not isinstance(given, np.ndarray | np.generic):
                array = _converted(array, self.array_dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{expected}: {error}") from None
        if array.dtype != self.array_dtype or array.shape != shape:
            raise ValueError(f"{expected}, got {array.dtype}{list(array.shape)}")
        return array

    def check(self, arrays: Mapping[str, Array], samples: int, tokens: int) -> None:
        """Raise ``ProtocolError`` unless the column's array in a payload is as declared."""
        array, sizes = arrays[self.key], arrays.get(self.sizes_key)
        if self.is_bytes:
            if sizes is None or sizes.dtype != _SIZES or sizes.shape != (samples,):
                got = "none" if sizes is None else f"{sizes.dtype}{list(sizes.shape)}"
                raise _malformed(f"column {self.name}: {self.sizes_key} must be int64[{samples}], got {got}")
            if (largest := int(sizes.max())) > self.max_bytes:
                allowed = f"one has at most {self.max_bytes} (max_bytes)"
                raise ProtocolError(
                    Code.OVERSIZE, f"column {self.name} has a byte string of {largest} bytes; {allowed}"
                )
            if int(sizes.min()) < 0 or array.ndim != 1 or array.dtype != _BYTES or sum(sizes.tolist()) != array.size:
                expected = f"uint8[{sum(sizes.tolist())}] with sizes of at least 0"
                raise _malformed(f"column {self.name} must be {expected}, got {array.dtype}{list(array.shape)}")
            return
        unit, count = ("a completion token", tokens) if self.per == "token" else ("a sample", samples)
        if self.shape is None:
            fitted = self.fitted(array)
            if fitted.shape is None or fitted.value_bytes > MAX_TOKEN_BYTES:
                allowed = f"it must be {self}, one value {unit} of at most {MAX_TOKEN_BYTES} bytes"
                raise _malformed(f"column {self.name} is {array.dtype}{list(array.shape)}; {allowed}")
            fitted.check(arrays, samples, tokens)
            return
        shape = (count, *self.shape)
        if array.dtype != self.array_dtype or array.shape != shape:
            expected = f"{self.dtype}{list(shape)}, one value {unit}"
            raise _malformed(f"column {self.name} must be {expected}; got {array.dtype}{list(array.shape)}")


def byte_strings(array: Array, sizes: Array) -> Array:
    """Return byte strings that lie one after another as an object array [n] of ``bytes``."""
    values = np.empty(len(sizes), object)
    for place, (start, end) in enumerate(pairwise(accumulate(sizes.tolist(), initial=0))):
        values[place] = array[start:end].tobytes()
    return values


def encode_columns(
    declared: Sequence[TypedColumn], given: Sequence[Mapping[str, Any]], lengths: Sequence[int], *, fill: bool = False
) -> dict[str, Array]:
    """Return the arrays of a payload from the columns of each sample, of ``lengths`` tokens each.

    An optional column may be missing, from all samples. ``fill``: the samples are not finished, so any value may be
    missing.
    Raises ``ValueError`` with sample and column.
    """
    arrays: dict[str, Array] = {}
    names = dict.fromkeys(column.name for column in declared)
    for sample, columns in enumerate(given):
        if unknown := next((name for name in columns if name not in names), None):
            raise ValueError(f"sample {sample}: the run has no column {unknown!r}; it has {', '.join(names) or 'none'}")
    for column in declared:
        if not column.required and not any(column.name in columns for columns in given):
            continue
        values: list[Any] = []
        column = column.fitted(next((columns[column.name] for columns in given if column.name in columns), None))
        for sample, (columns, tokens) in enumerate(zip(given, lengths, strict=True)):
            if column.name in columns:
                try:
                    values.append(column.value(columns[column.name], tokens))
                except ValueError as error:
                    raise ValueError(f"sample {sample}: column {column.name}: {error}") from None
            elif fill or (column.per == "token" and not tokens):
                values.append(column.empty(tokens))
            else:
                raise ValueError(f"sample {sample} lacks the column {column.name} ({column}, one a {column.per})")
        arrays |= column.encode(values)
    return arrays


def check_columns(declared: Sequence[TypedColumn], arrays: Mapping[str, Array], *, samples: int, tokens: int) -> None:
    """Raise ``ProtocolError`` unless the arrays of a payload are the declared columns."""
    known = {key for column in declared for key in (column.key, *([column.sizes_key] if column.is_bytes else []))}
    if unknown := next((name for name in arrays if name not in known), None):
        allowed = ", ".join(f"{column.key} {column}" for column in declared) or "none, as it has no [[column]]"
        raise _malformed(f"a push has the column {unknown!r}; the run declares {allowed}")
    for column in declared:
        if column.key in arrays:
            column.check(arrays, samples, tokens)
        elif column.required or column.sizes_key in arrays:
            raise _malformed(f"a push lacks the column {column.name}; it must have {column.key} {column}")


def _converted(array: Array, dtype: "np.dtype[Any]") -> Array:
    """Convert an array made from a list. Raises ``ValueError`` if a number would change beyond rounding."""
    if array.size == 0:
        return array.astype(dtype)
    if array.dtype.kind not in "iubf" or (dtype.kind != "f" and array.dtype.kind == "f"):
        raise ValueError(f"got a list of {array.dtype}")
    converted = array.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(converted, array):
        raise ValueError(f"got a number that {dtype} cannot hold")
    return converted


def _malformed(detail: str) -> ProtocolError:
    return ProtocolError(Code.MALFORMED, detail)
