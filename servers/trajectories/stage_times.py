"""Log when workers had groups of a stage, for the timeline of a run: one line per result, in the run directory.

Bounded: beyond ``MAX_BYTES`` the file is rotated and one old file is kept. Diagnostics only: nothing depends on it, and
lines that do not fit on a full disk are dropped.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from staleflow.servers.trajectories.stage_queue import Ticket

MAX_BYTES = 8 << 20
MAX_TICKETS = 1 << 16
"""Maximum number of tickets in progress; the oldest are forgotten first."""


def path_of(run_dir: Path, shard: int) -> Path:
    """Return the file of a shard."""
    return run_dir / f"stages-{shard}.jsonl"


class StageTimes:
    """Writer of the file. Times are seconds of the event loop, which uses the machine's monotonic clock, as ``m`` of
    the trace does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began: dict[tuple[str, int], float] = {}

    def started(self, stage: str, tickets: Iterable[Ticket], now_s: float) -> None:
        """Record that a worker got these tickets."""
        for ticket in tickets:
            self._began[stage, ticket.number] = now_s
        while len(self._began) > MAX_TICKETS:
            del self._began[next(iter(self._began))]

    def finished(self, stage: str, worker: str, tickets: Iterable[int], now_s: float) -> None:
        """Record that a worker returned these tickets, with results or without."""
        began = [start_s for number in tickets if (start_s := self._began.pop((stage, number), None)) is not None]
        if not began:
            return
        line = {"stage": stage, "worker": worker, "groups": len(began), "begin_s": min(began), "end_s": now_s}
        with suppress(OSError), self._path.open("ab", buffering=0) as file:  # as often as a worker returns a batch
            file.write(json.dumps(line).encode() + b"\n")
            if file.tell() > MAX_BYTES:
                self._path.replace(self._path.with_suffix(".old.jsonl"))
