"""When workers had groups of a stage, for a picture of the run: one line for each result, in the run directory.

Bounded: past ``MAX_BYTES`` the file begins anew and the one before is kept beside it. Nobody decides by it, and a full
disk has none.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from staleflow.servers.trajectories.stage_queue import Ticket

MAX_BYTES = 8 << 20
MAX_TICKETS = 1 << 16
"""Of groups that are with workers; older ones are forgotten."""


def path_of(run_dir: Path, shard: int) -> Path:
    """The file of a shard."""
    return run_dir / f"stages-{shard}.jsonl"


class StageTimes:
    """Times in seconds of the loop, which are those of the machine's monotonic clock, as ``m`` of the trace is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._began: dict[tuple[str, int], float] = {}

    def given(self, stage: str, tickets: Iterable[Ticket], now_s: float) -> None:
        """A worker has these from now on."""
        for ticket in tickets:
            self._began[stage, ticket.number] = now_s
        while len(self._began) > MAX_TICKETS:
            del self._began[next(iter(self._began))]

    def finished(self, stage: str, worker: str, tickets: Iterable[int], now_s: float) -> None:
        """It gave them back with what it made of them, or without."""
        began = [found for number in tickets if (found := self._began.pop((stage, number), None)) is not None]
        if not began:
            return
        line = {"stage": stage, "worker": worker, "groups": len(began), "begin_s": min(began), "end_s": now_s}
        with suppress(OSError):
            self._opened().write(json.dumps(line).encode() + b"\n")

    def _opened(self) -> FileIO:
        """The file for the next line. ``OSError``: there is none for this one, nor is it begun anew."""
        if self._file is None or self._file.tell() > MAX_BYTES:
            if self._file is not None:
                with suppress(FileNotFoundError):  # it was moved, and no new one could be opened
                    self._path.replace(self._path.with_suffix(".old.jsonl"))
            file = self._path.open("ab", buffering=0)
            self.close()
            self._file = file
        return self._file

    def close(self) -> None:
        """Nothing more comes."""
        if self._file is not None:
            self._file.close()
