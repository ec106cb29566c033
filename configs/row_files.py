"""Rows of a JSONL or Parquet file, whatever they are of: prompts, or the lengths of trajectories."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.errors import ConfigError

_json = msgspec.json.Decoder(dict[str, Any])


def read_rows(key: str, path: Path, column: str = "") -> Iterator[tuple[str, Any]]:
    """(where, row) of each row; of a Parquet file with ``column`` only, where it has such a one.

    ``ConfigError`` with the configuration's ``key`` when there is no such file, or a line or the file cannot be read.
    """
    if not path.is_file():
        raise ConfigError(key, str(path), "no such file")
    match path.suffix:
        case ".jsonl":
            return _jsonl(key, path)
        case ".parquet":
            return _parquet(key, path, column)
        case _:
            raise ConfigError(key, str(path), "it must end in .jsonl or .parquet")


def _jsonl(key: str, path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", _json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(key, str(path), f"line {number} must be a JSON object: {error}") from error


def _parquet(key: str, path: Path, column: str) -> Iterator[tuple[str, Any]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        wanted = 'reading Parquet needs the extra: pip install "staleflow[parquet]"'
        raise ConfigError(key, str(path), wanted) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = [column] if column in file.schema_arrow.names else None
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    yield f"row {number}", row
                    number += 1
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(key, str(path), f"it must be a Parquet file: {error}") from error
