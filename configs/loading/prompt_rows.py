"""Prompt rows from a JSONL or Parquet file, or from a user's Python iterable.

A row is a dict with a text column ``prompt``; other columns go to the stages unchanged. All rows are read once into
their encoded form and identified by one sha256, which is the same for the same rows from any kind of source.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.errors import MISSING, ConfigError
from staleflow.configs.evals import EvalSet
from staleflow.configs.imports import load_object
from staleflow.configs.loading.hub_files import hub_files, is_hub
from staleflow.configs.loading.row_files import prompt_row, read_rows
from staleflow.configs.schema import Prompts

MAX_ROWS = 50_000_000
"""Maximum number of prompts in one pass, each some bytes of the trajectory servers' memory."""

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

    def repeated(self, count: int) -> Iterator[bytes]:
        """Return ``count`` encoded rows: all of them, in order, over and over."""
        return itertools.islice(itertools.cycle(self._encoded), count)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return _decoder.decode(self._encoded[row])


def open_prompts(prompts: Prompts, *, seed: int) -> PromptRows:
    """Return the training rows. ``ConfigError`` names the row that is missing or malformed."""
    if not prompts.sources:
        return _open("prompts.", "", prompts.path, prompts.source, prompts, prompts.options, seed)
    each = [
        _open(f"prompts.sources[{place}].", "", given.path, given.source, prompts, given.options, seed)
        for place, given in enumerate(prompts.sources)
    ]
    return mixed(each, [given.weight for given in prompts.sources])


def mixed(each: Sequence[PromptRows], weights: Sequence[float]) -> PromptRows:
    """Return one pass over several sources: all rows of the first source, then of the next.

    The scheduler's order mixes them. A row is repeated as often as its source needs for its share.
    """
    counts = shares([len(rows) for rows in each], weights)
    return PromptRows([row for rows, count in zip(each, counts, strict=True) for row in rows.repeated(count)])


def shares(rows: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the number of rows of each source in one pass: in proportion to the weights, and at least all rows."""
    scale = max(number / weight for number, weight in zip(rows, weights, strict=True))
    counts = [max(number, round(weight * scale)) for number, weight in zip(rows, weights, strict=True)]
    if sum(counts) > MAX_ROWS:
        allowed = f"a pass over the rows would have {sum(counts)} prompts of {sum(rows)} rows: at most {MAX_ROWS}"
        raise ConfigError("prompts.sources.weight", list(weights), f"{allowed}; bring the weights nearer to each other")
    return counts


def open_eval_prompts(prompts: Prompts, *, seed: int) -> PromptRows | None:
    """Return the held-out rows; None if the configuration names none."""
    if not prompts.eval_path and not prompts.eval_source:
        return None
    return _open("prompts.", "eval_", prompts.eval_path, prompts.eval_source, prompts, prompts.options, seed)


def open_eval_set(given: EvalSet, prompts: Prompts, place: int, *, seed: int) -> list[dict[str, Any]]:
    """Return the rows of the set ``eval[place]``: the first ``given.prompts`` of its source. ``prompts``: the settings
    of every prompt of the run, such as renames of columns. Raises ``ConfigError``."""
    rows = _open(f"eval[{place}].", "", given.path, given.source, prompts, given.options, seed)
    return [rows[number] for number in range(min(given.prompts, len(rows)))]


def _open(
    table: str, prefix: str, path: str, source: str, prompts: Prompts, options: Mapping[str, Any], seed: int
) -> PromptRows:
    if bool(path) == bool(source):
        value = f"{path} and {source}" if path else MISSING
        raise ConfigError(f"{table}{prefix}path", value, f"exactly one of it and {table}{prefix}source must be set")
    key, given = (f"{table}{prefix}path", path) if path else (f"{table}{prefix}source", source)
    rows = read_prompts(key, path) if path else _from_source(key, source, {"seed": seed, **options})
    encoded = [
        prompt_row(key, given, place, row, prompts.columns, chat_template=prompts.chat_template)[1]
        for place, row in rows
    ]
    if not encoded:
        raise ConfigError(key, given, "it has no rows")
    return PromptRows(encoded)


def read_prompts(key: str, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of a file, or of the files of a dataset in the hub's cache. Raises ``ConfigError``."""
    if not is_hub(path):
        yield from read_rows(key, Path(path))
        return
    for file in hub_files(key, path):
        for place, row in read_rows(key, file):
            yield f"{file.name}, {place}", row


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
