"""One trajectory on a simulated engine: how long it will be, how much is written, by which versions."""

from enum import Enum

from staleflow.protocols.consistency.ids import Lineage, Segment, Version


class Place(Enum):
    """Where a sample is."""

    OUT = "out"
    """At no engine: not begun, over, or on its way to another one."""
    WAITING = "waiting"
    RUNNING = "running"
    AWAY = "away"
    """At a tool, between two turns."""


class Fate(Enum):
    """Why a sample leaves its engine."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    """It is over with the tokens that it has."""
    WITHDRAWN = "withdrawn"
    """It goes on at another engine."""
    ABORTED = "aborted"
    """Nobody wants it."""


class Sample:
    """``turns``: tokens that the model writes in each turn; ``tools``: seconds at a tool after each but the last."""

    __slots__ = (
        "end",
        "fate",
        "id",
        "length",
        "place",
        "prompt",
        "segments",
        "start",
        "ticket",
        "tools",
        "turn",
        "turn_end",
        "turns",
        "written",
    )

    def __init__(self, id: int, prompt: int, turns: tuple[int, ...], tools: tuple[float, ...] = ()) -> None:
        self.id = id
        self.prompt = prompt
        self.turns = turns
        self.tools = tools
        self.length = sum(turns)
        """Tokens that it will have."""
        self.place = Place.OUT
        self.fate = Fate.DONE
        """What it will leave for, as things stand."""
        self.turn = 0
        self.turn_end = turns[0]
        """Tokens at which this turn ends."""
        self.written = 0
        """Tokens up to ``start``."""
        self.segments: list[Segment] = []
        self.start = 0
        """The engine's step at which it joined."""
        self.end = 0
        """The engine's step at which it leaves."""
        self.ticket = 0
        """Rises with each change of place; what was planned for an older one is void."""

    @property
    def truncated(self) -> bool:
        """Whether an interrupt cut it short."""
        return self.fate is Fate.INTERRUPTED and self.written < self.length

    def next_turn(self) -> float:
        """Begin another turn; seconds that the tool takes before it."""
        seconds = self.tools[self.turn] if self.turn < len(self.tools) else 0.0
        self.turn += 1
        self.turn_end += self.turns[self.turn]
        return seconds

    def add(self, lineage: Lineage, version: Version, tokens: int) -> None:
        """So many more tokens, of one version."""
        if tokens <= 0:
            return
        self.written += tokens
        if self.segments and self.segments[-1][:2] == (lineage, version):
            tokens += self.segments.pop().tokens
        self.segments.append(Segment(lineage, version, tokens))


def segments_of(samples: list[Sample]) -> list[Segment]:
    """Tokens of all samples by version, ascending."""
    tokens: dict[tuple[Lineage, Version], int] = {}
    for sample in samples:
        for lineage, version, count in sample.segments:
            tokens[lineage, version] = tokens.get((lineage, version), 0) + count
    return [Segment(*weights, tokens[weights]) for weights in sorted(tokens)]
