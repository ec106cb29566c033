"""Prompt rows from a JSONL or Parquet file, or from a user's Python iterable.

A row is a dict with a text column ``prompt``; other columns go to the stages unchanged. All rows are read once into
their encoded form and identified by one sha256, which is the same for the same rows from any kind of source.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.errors import MISSING, ConfigError
from staleflow.configs.imports import load_object
from staleflow.configs.loading.row_files import prompt_row, read_rows
from staleflow.configs.schema import Prompts

_decoder = msgspec.msgpack.Decoder(dict[str, Any])


class PromptRows:
    """Rows by number, and ``sha``: the hex sha256 over all of them in order."""

    def __init__(self, encoded: list[bytes]) -> None:
        self._encoded = encoded
        digest = hashlib.sha256()
        for row in encoded:
            digest.update(len(row).to_bytes(8, "little") + row)
        self.sha = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return _decoder.decode(self._encoded[row])


def open_prompts(prompts: Prompts, *, seed: int) -> PromptRows:
    """Return the training rows. ``ConfigError`` names the row that is missing or malformed."""
    return _open("", prompts.path, prompts.source, prompts, seed)


def open_eval_prompts(prompts: Prompts, *, seed: int) -> PromptRows | None:
    """Return the held-out rows; None if the configuration names none."""
    if not prompts.eval_path and not prompts.eval_source:
        return None
    return _open("eval_", prompts.eval_path, prompts.eval_source, prompts, seed)


def _open(prefix: str, path: str, source: str, prompts: Prompts, seed: int) -> PromptRows:
    if bool(path) == bool(source):
        value = f"{path} and {source}" if path else MISSING
        raise ConfigError(f"prompts.{prefix}path", value, f"exactly one of it and prompts.{prefix}source must be set")
    key, given = (f"prompts.{prefix}path", path) if path else (f"prompts.{prefix}source", source)
    rows = read_rows(key, Path(path)) if path else _from_source(key, source, {"seed": seed, **prompts.options})
    encoded = [prompt_row(key, given, place, row, prompts.columns)[1] for place, row in rows]
    if not encoded:
        raise ConfigError(key, given, "it has no rows")
    return PromptRows(encoded)


def _from_source(key: str, source: str, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    function = load_object(source, key)
    try:
        rows: Any = function(**options)
        for number, row in enumerate(rows):
            yield f"row {number}", row
    except ConfigError:
        raise
    except Exception as error:  # user code may raise anything, and the operator must see it
        raise ConfigError(key, source, f"calling it failed ({type(error).__name__}: {error})") from error
