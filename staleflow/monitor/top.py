"""``staleflow top``: a source, a screen and a keyboard, brought together; or lines, where there is no terminal."""

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
from staleflow.monitor.screen import WIDE, Telling, dashboard, keys
from staleflow.monitor.sources import Live, Replay
from staleflow.monitor.story import events_about, headline, story
from staleflow.net.errors import Unavailable
from staleflow.process.sanitize import json_line

FRAME_S = 0.25
"""Between two drawings at least; a key is answered at once."""
REST, REST_OF_A_REPLAY = 20, 4
"""Time between two drawings, in CPU times of the last one: who looks on shares the machine with the run."""
FIRST_ANSWER_S = 5.0
"""A service that says nothing for so long at the beginning is not there."""
GONE_S = 30.0
"""Lines end when nothing was heard for so long; a screen stays, and shows when it comes back."""
PAUSE_S = 3600.0
"""Of a replay in lines: when nothing happens for longer, the next line is that of the next event."""
SECOND_ANSWER_S = 1.0
"""The parameter server's is waited for so long, and done without."""


class Stories:
    """Reads the story of a group beside the screen: a trace may be long."""

    def __init__(self, trace: Callable[[], Path | None]) -> None:
        """``trace``: where it is now; None while it is out of reach."""
        self._trace = trace
        self._pool = ThreadPoolExecutor(1, "story")
        self._asked: tuple[int, Future[Telling]] | None = None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def of(self, group: int | None) -> Telling | None:
        """None while it is read."""
        if group is None:
            self._asked = None
            return None
        if self._asked is None or self._asked[0] != group:
            self._asked = group, self._pool.submit(self._tell, group)
        told = self._asked[1]
        return told.result() if told.done() else None

    def _tell(self, group: int) -> Telling:
        trace = self._trace()
        if trace is None:
            where = "its story is in the run directory's trace, out of reach from here: staleflow trace show RUN_DIR"
            return Telling(headline=where, chapters=())
        try:
            events = events_about(trace, group)
        except ConfigError as error:
            return Telling(headline=str(error), chapters=())
        return Telling(headline=headline(events, group), chapters=story(events, group))


class Top:
    """One source on one terminal, until somebody leaves."""

    def __init__(self, source: "Live | Replay", console: Console, look: Look) -> None:
        self._source = source
        self._console = console
        self._look = look
        self._history = History()
        self._stories = Stories(lambda: source.trace)
        self._board = self._see()

    def run(self, keyboard: Keyboard) -> None:
        """Draw and listen; Ctrl-C is a way to leave like any other."""
        with keyboard, Display(console=self._console, screen=True, auto_refresh=False) as display:
            keyboard.around_a_stop(display.stop, display.start)
            try:
                self._until_left(display, keyboard)
            except KeyboardInterrupt:
                pass
            finally:
                self._stories.close()

    def _until_left(self, display: Display, keyboard: Keyboard) -> None:
        drawn = time.monotonic()
        rest = REST_OF_A_REPLAY if isinstance(self._source, Replay) else REST
        while not self._look.leaving:
            began = time.process_time()
            if not keyboard.away:
                display.update(self.drawing(), refresh=True)
            rest_s = rest * (time.process_time() - began)
            for key in self._pressed(keyboard, max(FRAME_S, rest_s)):
                self._look = press(self._look, key, self._board)
            now, jumps = time.monotonic(), bool(self._look.jump_s)
            self._move_on(now - drawn)
            drawn = time.monotonic() if jumps else now  # back is the whole trace again, and no time of the run

    def _pressed(self, keyboard: Keyboard, within_s: float) -> list[str]:
        if self._look.story is not None and self._stories.of(self._look.story) is None:
            within_s = FRAME_S
        return keyboard.read(within_s)

    def _move_on(self, passed_s: float) -> None:
        """The replay goes on by what has passed; a screen that is held still shows the same board again."""
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
        """What is on the screen now."""
        width, height = self._console.size
        footer = keys(self._look)
        telling = self._stories.of(self._look.story)
        return dashboard(self._board, self._look, width, height, footer=footer, telling=telling)


def once(source: "Live | Replay", console: Console, *, as_json: bool) -> None:
    """One picture, or the whole board as one line of JSON; of a replay the end. Pauses of it are left out."""
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
    """A line now and then until the run is over; yields the seconds to wait before the next.

    Hours of a replay in which nothing happens are left out.
    """
    history = History()
    every_s = 1.0 if as_json else INTERVAL_S
    while True:
        it = _board(source, history)
        print(encoded(it) if as_json else line(it), file=to, flush=True)
        if it.phase in ("finished", "drained", "failed", "interrupted", "replay, the end"):
            return
        if isinstance(source, Live) and source.silent_s > GONE_S:
            raise Unavailable(source.address, source.silent_s)
        yield every_s / (speed or 1.0)
        if isinstance(source, Replay):
            source.advance(source.until_next_s if source.until_next_s > PAUSE_S else every_s)


def encoded(it: Board) -> str:
    """A board as one line of JSON."""
    return json_line(asdict(it))


def _board(source: "Live | Replay", history: History) -> Board:
    snapshot = source.snapshot()
    history.see(snapshot)
    return board(source.name, snapshot, history)


@contextmanager
def answering(source: Live) -> Generator[Live]:
    """``source`` once it has said something. ``Unavailable`` when it says nothing for ``FIRST_ANSWER_S``."""
    with source:
        until = time.monotonic() + FIRST_ANSWER_S
        while not source.answered:
            if time.monotonic() > until:
                raise Unavailable(source.address, FIRST_ANSWER_S)
            time.sleep(0.02)
        source.snapshot()  # asks the parameter server, whose address is known now
        until = time.monotonic() + SECOND_ANSWER_S
        while not source.complete and time.monotonic() < until:
            time.sleep(0.02)
        yield source


def show(source: "Live | Replay", *, as_json: bool, only_once: bool, speed: float | None) -> None:
    """On a terminal that can be drawn on the screen; else lines. ``speed``: of a replay."""
    console = Console(highlight=False)
    if only_once:
        once(source, console, as_json=as_json)
    elif console.is_terminal and not console.is_dumb_terminal and not as_json:
        Top(source, console, Look(speed=speed)).run(Keyboard())
    else:
        for wait_s in lines(source, sys.stdout, as_json=as_json, speed=speed):
            time.sleep(wait_s)
