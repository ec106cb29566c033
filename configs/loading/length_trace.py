"""Lengths of real trajectories: one column of a JSONL or Parquet file, one trajectory a row."""

import math
from pathlib import Path
from typing import Any

from staleflow.configs.errors import MISSING, ConfigError
from staleflow.configs.loading.row_files import read_rows

KEY = "rollout.simulated.trace"


def read_lengths(path: Path, column: str) -> list[int]:
    """Return the number of tokens of each row.

    ``ConfigError`` names the row that lacks the column or whose length is not a whole number of at least 1.
    """
    lengths = [_length(path, column, place, row.get(column, MISSING)) for place, row in read_rows(KEY, path, column)]
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
