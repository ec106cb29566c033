"""The journals of the witnesses: one JSON object a line, one file a process, written before and after each act.

A line is one ``write`` to a file opened for appending: a process that is killed leaves whole lines behind, and what it
did not write it did not see.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class Journal:
    """Where one witness writes. Several processes may follow each other on the same file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, **values: object) -> None:
        """One entry, in the file when this returns."""
        entry = {"what": what, "t": time.time_ns(), **values}
        os.write(self._file, json.dumps(entry, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read(folder: Path) -> dict[str, list[Entry]]:
    """Every journal of a folder by name, in the order of writing."""
    return {path.stem: list(_entries(path)) for path in sorted(folder.glob("*.jsonl"))}


def _entries(path: Path) -> Iterator[Entry]:
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)
