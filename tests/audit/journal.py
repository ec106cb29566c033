"""Journals of the witnesses: one JSON object per line, one file per process, written before and after each act.

A line is one ``write`` to a file opened for appending. A killed process therefore leaves only whole lines, and it did
not observe anything that its journal lacks.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class Journal:
    """The journal of one witness. Several processes may append to the same file, one after the other."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, **values: object) -> None:
        """Append one entry; it is in the file when this returns."""
        entry = {"what": what, "t": time.time_ns(), **values}
        os.write(self._file, json.dumps(entry, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read(folder: Path) -> dict[str, list[Entry]]:
    """Return every journal of a folder by name, its entries in the order of writing."""
    return {path.stem: list(_entries(path)) for path in sorted(folder.glob("*.jsonl"))}


def _entries(path: Path) -> Iterator[Entry]:
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)
