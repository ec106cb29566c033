"""Plain-text view of a run for logs: one line every few seconds."""

import time
from pathlib import Path
from typing import TextIO

from rich.console import Console

from staleflow.monitor.ending import print_summary
from staleflow.monitor.history import History
from staleflow.monitor.model import Board, board
from staleflow.monitor.words import INSECURE, clock, number, plural, whole
from staleflow.process.sanitize import json_line, printable_lines
from staleflow.supervisor.summary import Summary
from staleflow.supervisor.view import Snapshot

INTERVAL_S = 5.0


class PlainView:
    """View that prints a line every few seconds and at every phase change, preceded by ``run_dir`` if given.

    The summary goes to ``summary_to`` as JSON if given, else to ``to`` as a table.
    """

    def __init__(
        self,
        to: TextIO,
        name: str,
        summary_to: TextIO | None = None,
        every_s: float = INTERVAL_S,
        *,
        run_dir: Path | None = None,
    ) -> None:
        self._to = to
        self._name = name
        self._run_dir = run_dir
        self._summary_to = summary_to
        self._every_s = every_s
        self._history = History()
        self._phase = ""
        self._shown_at = 0.0

    def start(self) -> None:
        if self._run_dir is not None:
            self.notify(f"run directory: {self._run_dir}")

    def show(self, snapshot: Snapshot) -> None:
        self._history.see(snapshot)
        now = time.monotonic()
        if snapshot.phase == self._phase and now - self._shown_at < self._every_s:
            return
        self._phase, self._shown_at = snapshot.phase, now
        self.notify(line(board(self._name, snapshot, self._history)))

    def notify(self, text: str) -> None:
        print(printable_lines(text), file=self._to, flush=True)

    def stop(self) -> None:
        pass

    def summary(self, summary: Summary) -> None:
        if self._summary_to is not None:
            print(json_line(summary), file=self._summary_to, flush=True)
        else:
            print_summary(summary, Console(file=self._to, highlight=False, width=88))


def line(it: Board) -> str:
    """Return the state of the run as one line."""
    parts = [f"{clock(it.elapsed_s):>7}  {it.phase}"]
    if it.steps:
        parts.append(f"{it.step}/{it.steps} steps")
        parts.append(f"reward {number(it.reward)}")
        if it.held_out:
            parts.append(f"held-out {number(it.held_out[0])} -> {number(it.held_out[1])}")
        parts.append(f"staleness {number(it.staleness_mean, 1)}/{whole(it.staleness_max)} of {whole(it.bound)}")
        parts.append(f"{whole(it.trained_per_s)} tokens/s")
    if it.insecure:
        parts.append(INSECURE)
    if it.violations:
        parts.append(plural(it.violations, "violation").upper())
    note = it.why or (it.roles[0].doing if len(it.roles) == 1 else "")
    loading = next((f"{role.name} {role.doing}" for role in it.roles if role.doing.startswith("loading: ")), "")
    note = "; ".join(filter(None, (note, loading)))
    return "  ".join(parts) + (f"  ({note})" if note else "")
