"""The live view of ``staleflow run``: the screen of ``top``, fed by the supervisor and erased when the run ends."""

import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from staleflow.monitor.ending import print_summary
from staleflow.monitor.history import History
from staleflow.monitor.keyboard import Keyboard
from staleflow.monitor.look import Look, press
from staleflow.monitor.model import Board, board
from staleflow.monitor.screen import dashboard, keys
from staleflow.monitor.top import REST_FACTOR, Stories
from staleflow.process.sanitize import printable_lines
from staleflow.supervisor.summary import Summary
from staleflow.supervisor.view import Snapshot

REFRESH_INTERVAL_S = 0.25


class LiveView:
    """Interactive view of a run on a terminal. It has the keys of ``top`` except quitting: Ctrl-C ends the run."""

    def __init__(self, name: str, run_dir: Path, console: Console | None = None) -> None:
        self._name = name
        self._hint = str(run_dir)
        self._console = console or Console(highlight=False)
        self._live = self._display()
        self._keyboard = Keyboard()
        self._keyboard.on_suspend(self._leave, self._resume)
        self._history = History()
        self._look = Look(tab="processes", ends_run=True)
        self._stories = Stories(lambda: run_dir / "trace.jsonl")
        self._board: Board | None = None
        self._shown_at = self._pause_s = 0.0

    def _display(self) -> Live:
        return Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def _leave(self) -> None:
        self._live.stop()

    def _resume(self) -> None:
        self._live = self._display()
        self._live.start()
        self._shown_at = 0.0

    def start(self) -> None:
        self._keyboard.__enter__()
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        self._history.see(snapshot)
        pressed = self._keyboard.read(0.0)
        now = time.monotonic()
        if self._keyboard.away:
            return
        if now - self._shown_at < max(REFRESH_INTERVAL_S, self._pause_s) and not pressed:
            return
        self._shown_at = now
        if self._board is None or not self._look.paused:
            self._board = board(self._name, snapshot, self._history)
        for key in pressed:
            self._look = press(self._look, key, self._board)
        began = time.process_time()
        self._draw(self._board)
        self._pause_s = REST_FACTOR * (time.process_time() - began)

    def _draw(self, it: Board) -> None:
        width, height = self._console.size
        footer = keys(self._look, hint=self._hint, width=width)
        open_story = self._stories.of(self._look.story)
        screen = dashboard(it, self._look, width, height - 1, footer=footer, open_story=open_story)
        self._live.update(screen, refresh=True)

    def notify(self, text: str) -> None:
        self._console.print(Text(printable_lines(text), style="yellow"), soft_wrap=True)

    def stop(self) -> None:
        self._stories.close()
        self._live.stop()
        self._keyboard.__exit__(None, None, None)

    def summary(self, summary: Summary) -> None:
        print_summary(summary, self._console)
