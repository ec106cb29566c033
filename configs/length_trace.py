"""The lengths of real trajectories: one column of a JSONL or Parquet file, a trajectory a row."""

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from staleflow.configs.errors import MISSING, ConfigError

KEY = "rollout.simulated.trace"


def read_lengths(path: Path, column: str) -> list[int]:
    """Tokens of each row. ``ConfigError`` names the row that lacks the column or has no length of 1 or more there."""
    if not path.is_file():
        raise ConfigError(KEY, str(path), "no such file")
    match path.suffix:
        case ".jsonl":
            values = _jsonl(path, column)
        case ".parquet":
            values = _parquet(path, column)
        case _:
            raise ConfigError(KEY, str(path), "it must end in .jsonl or .parquet")
    lengths = [_length(path, column, place, value) for place, value in values]
    if not lengths:
        raise ConfigError(KEY, str(path), "it has no rows")
    return lengths


def _length(path: Path, column: str, place: str, value: Any) -> int:
    if value is MISSING:
        raise ConfigError(
            KEY, str(path), f'{place} has no column "{column}"; name it in rollout.simulated.trace_column'
        )
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 1 or value != int(value):
        shown = "nothing" if value is None else value
        raise ConfigError(KEY, str(path), f'{place}: column "{column}" is {shown}; it must be a whole number from 1')
    return int(value)


def _jsonl(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row: object = json.loads(line)
            except ValueError as error:
                raise ConfigError(KEY, str(path), f"line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(KEY, str(path), f"line {number} must be a JSON object")
            yield f"line {number}", cast(dict[str, Any], row).get(column, MISSING)


def _parquet(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        wanted = 'reading Parquet needs the extra: pip install "staleflow[parquet]"'
        raise ConfigError(KEY, str(path), wanted) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                yield "row 0", MISSING
                return
            for batch in file.iter_batches(columns=[column]):
                for value in batch.column(0).to_pylist():
                    yield f"row {number}", value
                    number += 1
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(KEY, str(path), f"it must be a Parquet file: {error}") from error
