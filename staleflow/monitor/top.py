"""Main loop of ``staleflow top``: connect a source, the screen and the keyboard, or print lines without a terminal."""

import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live as Display

from staleflow.configs.errors import ConfigError
from staleflow.monitor.history import History
from staleflow.monitor.keyboard import Keyboard
from staleflow.monitor.look import Look, press
from staleflow.monitor.model import Board, board
from staleflow.monitor.plain import INTERVAL_S, line
from staleflow.monitor.screen import WIDE, OpenStory, dashboard, keys
from staleflow.monitor.sources import Live, Replay
from staleflow.monitor.story import events_about, headline, story
from staleflow.net.errors import Unavailable
from staleflow.process.sanitize import json_line

FRAME_INTERVAL_S = 0.25
"""Minimum seconds between two redraws without a key press; a key redraws at once."""
REST_FACTOR, REPLAY_REST_FACTOR = 20, 4
"""Minimum time between two redraws as a multiple of the last one's CPU time, to leave the machine to the run."""
CONNECT_TIMEOUT_S = 5.0
"""Seconds to wait for the first answer of the scheduler."""
SILENCE_TIMEOUT_S = 30.0
"""Seconds of silence after which line output ends; the screen stays open and recovers when the scheduler answers."""
MAX_REPLAY_PAUSE_S = 3600.0
"""Longest pause of a replay in lines; a longer one is skipped up to the next event."""
PARAMETERS_TIMEOUT_S = 1.0
"""Seconds to wait for the parameter server's first answer, which is optional."""


class Stories:
    """Reads the story of a group in a background thread, because a trace may be long."""

    def __init__(self, trace: Callable[[], Path | None]) -> None:
        """``trace`` returns the current path of the trace; None if it cannot be reached."""
        self._trace = trace
        self._pool = ThreadPoolExecutor(1, "story")
        self._pending: tuple[int, Future[OpenStory]] | None = None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def of(self, group: int | None) -> OpenStory | None:
        """Return the story of ``group``; None while it is being read."""
        if group is None:
            self._pending = None
            return None
        if self._pending is None or self._pending[0] != group:
            self._pending = group, self._pool.submit(self._read, group)
        reading = self._pending[1]
        return reading.result() if reading.done() else None

    def _read(self, group: int) -> OpenStory:
        trace = self._trace()
        if trace is None:
            where = "the trace in the run directory cannot be read from here: use staleflow trace show RUN_DIR there"
            return OpenStory(headline=where, chapters=())
        try:
            events = events_about(trace, group)
        except ConfigError as error:
            return OpenStory(headline=str(error), chapters=())
        return OpenStory(headline=headline(events, group), chapters=story(events, group))


class Top:
    """Interactive screen of one source on one terminal."""

    def __init__(self, source: "Live | Replay", console: Console, look: Look) -> None:
        self._source = source
        self._console = console
        self._look = look
        self._history = History()
        self._stories = Stories(lambda: source.trace)
        self._board = self._see()

    def run(self, keyboard: Keyboard) -> None:
        """Draw the screen and handle keys until the user leaves; Ctrl-C leaves, too."""
        with keyboard, Display(console=self._console, screen=True, auto_refresh=False) as display:
            keyboard.on_suspend(display.stop, display.start)
            try:
                self._until_left(display, keyboard)
            except KeyboardInterrupt:
                pass
            finally:
                self._stories.close()

    def _until_left(self, display: Display, keyboard: Keyboard) -> None:
        drawn = time.monotonic()
        rest = REPLAY_REST_FACTOR if isinstance(self._source, Replay) else REST_FACTOR
        while not self._look.leaving:
            began = time.process_time()
            if not keyboard.away:
                display.update(self.drawing(), refresh=True)
            rest_s = rest * (time.process_time() - began)
            for key in self._pressed(keyboard, max(FRAME_INTERVAL_S, rest_s)):
                self._look = press(self._look, key, self._board)
            now, jumps = time.monotonic(), bool(self._look.jump_s)
            self._advance(now - drawn)
            drawn = (
                time.monotonic() if jumps else now
            )  # a seek may re-read the whole trace; this time must not advance the replay

    def _pressed(self, keyboard: Keyboard, within_s: float) -> list[str]:
        if self._look.story is not None and self._stories.of(self._look.story) is None:
            within_s = FRAME_INTERVAL_S
        return keyboard.read(within_s)

    def _advance(self, passed_s: float) -> None:
        """Advance a replay by the elapsed time, and refresh the board unless the screen is paused."""
        look = self._look
        if isinstance(self._source, Replay):
            by_s = look.jump_s or (0.0 if look.paused else passed_s * (look.speed or 1.0))
            self._look = replace(look, jump_s=0.0)
            if by_s < 0:
                self._history = History()
            if by_s:
                self._source.advance(by_s)
            if by_s or not look.paused:
                self._board = self._see()
        elif not look.paused:
            self._board = self._see()

    def _see(self) -> Board:
        snapshot = self._source.snapshot()
        self._history.see(snapshot)
        return board(self._source.name, snapshot, self._history)

    def drawing(self) -> RenderableType:
        """Return the content of the screen."""
        width, height = self._console.size
        footer = keys(self._look)
        open_story = self._stories.of(self._look.story)
        return dashboard(self._board, self._look, width, height, footer=footer, open_story=open_story)


def once(source: "Live | Replay", console: Console, *, as_json: bool) -> None:
    """Print one screen, or the board as one line of JSON; for a replay, the state at its end."""
    history = History()
    while isinstance(source, Replay) and not source.over:
        source.advance(max(1.0, source.until_next_s))
        history.see(source.snapshot())
    it = _board(source, history)
    if as_json:
        console.file.write(encoded(it) + "\n")
        return
    width = console.width
    height = 50 if width >= WIDE else 24
    console.print(dashboard(it, Look(), width, height))


def lines(source: "Live | Replay", to: TextIO, *, as_json: bool, speed: float | None) -> Iterator[float]:
    """Print lines until the run ends; yield the seconds to wait before the next one.

    Pauses of a replay that exceed ``MAX_REPLAY_PAUSE_S`` are skipped.
    """
    history = History()
    every_s = 1.0 if as_json else INTERVAL_S
    while True:
        it = _board(source, history)
        print(encoded(it) if as_json else line(it), file=to, flush=True)
        if it.phase in ("finished", "drained", "failed", "interrupted", "replay, the end"):
            return
        if isinstance(source, Live) and source.silent_s > SILENCE_TIMEOUT_S:
            raise Unavailable(source.address, source.silent_s)
        yield every_s / (speed or 1.0)
        if isinstance(source, Replay):
            source.advance(source.until_next_s if source.until_next_s > MAX_REPLAY_PAUSE_S else every_s)


def encoded(it: Board) -> str:
    """Return a board as one line of JSON."""
    return json_line(asdict(it))


def _board(source: "Live | Replay", history: History) -> Board:
    snapshot = source.snapshot()
    history.see(snapshot)
    return board(source.name, snapshot, history)


@contextmanager
def answering(source: Live) -> Generator[Live]:
    """Yield ``source`` once it has answered. Raise ``Unavailable`` after ``CONNECT_TIMEOUT_S`` without an answer."""
    with source:
        until = time.monotonic() + CONNECT_TIMEOUT_S
        while not source.answered:
            if time.monotonic() > until:
                raise Unavailable(source.address, CONNECT_TIMEOUT_S)
            time.sleep(0.02)
        source.snapshot()  # starts polling the parameter server, whose address is known now
        until = time.monotonic() + PARAMETERS_TIMEOUT_S
        while not source.complete and time.monotonic() < until:
            time.sleep(0.02)
        yield source


def show(source: "Live | Replay", *, as_json: bool, only_once: bool, speed: float | None) -> None:
    """Show the interactive screen on a capable terminal, else print lines. ``speed`` applies to replays."""
    console = Console(highlight=False)
    if only_once:
        once(source, console, as_json=as_json)
    elif console.is_terminal and not console.is_dumb_terminal and not as_json:
        Top(source, console, Look(speed=speed)).run(Keyboard())
    else:
        for wait_s in lines(source, sys.stdout, as_json=as_json, speed=speed):
            time.sleep(wait_s)
