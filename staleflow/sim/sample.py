"""One trajectory on a simulated engine: its final length, the tokens written so far, and their versions."""

from enum import Enum

from staleflow.protocols.consistency.ids import Lineage, Segment, Version


class Place(Enum):
    """Location of a sample."""

    OUT = "out"
    """At no engine: not started, finished, or on its way to another one."""
    WAITING = "waiting"
    RUNNING = "running"
    AWAY = "away"
    """At a tool, between two turns."""


class Fate(Enum):
    """Reason for which a sample leaves its engine."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    """It ends with the tokens that it has."""
    WITHDRAWN = "withdrawn"
    """It continues at another engine."""
    ABORTED = "aborted"
    """It is discarded."""


class Sample:
    """One sample. ``turns``: tokens that the model writes in each turn; ``tools``: seconds at a tool after each but the
    last."""

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
        """Final number of tokens."""
        self.place = Place.OUT
        self.fate = Fate.DONE
        """Reason for which it will leave its engine, as currently planned."""
        self.turn = 0
        self.turn_end = turns[0]
        """Number of tokens at which this turn ends."""
        self.written = 0
        """Tokens written up to ``start``."""
        self.segments: list[Segment] = []
        self.start = 0
        """Step of the engine at which it joined."""
        self.end = 0
        """Step of the engine at which it leaves."""
        self.ticket = 0
        """Increases with each change of place; plans made for an older ticket are void."""

    @property
    def truncated(self) -> bool:
        """True if an interrupt cut it short."""
        return self.fate is Fate.INTERRUPTED and self.written < self.length

    def next_turn(self) -> float:
        """Start another turn; return the seconds that the tool takes before it."""
        seconds = self.tools[self.turn] if self.turn < len(self.tools) else 0.0
        self.turn += 1
        self.turn_end += self.turns[self.turn]
        return seconds

    def add(self, lineage: Lineage, version: Version, tokens: int) -> None:
        """Append ``tokens`` tokens of one version."""
        if tokens <= 0:
            return
        self.written += tokens
        if self.segments and self.segments[-1][:2] == (lineage, version):
            tokens += self.segments.pop().tokens
        self.segments.append(Segment(lineage, version, tokens))


def segments_of(samples: list[Sample]) -> list[Segment]:
    """Return the tokens of all samples by version, ascending."""
    tokens: dict[tuple[Lineage, Version], int] = {}
    for sample in samples:
        for lineage, version, count in sample.segments:
            tokens[lineage, version] = tokens.get((lineage, version), 0) + count
    return [Segment(*weights, tokens[weights]) for weights in sorted(tokens)]
