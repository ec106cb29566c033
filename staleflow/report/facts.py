"""Plain records of what a trace contains: steps, waits, versions, waste, and failures.

Times are seconds since the first event by the scheduler's clock, without periods in which no scheduler ran. Filled by
``staleflow.report.reading`` in one pass.
"""

from collections import Counter
from dataclasses import dataclass, field

from staleflow.trace.fold import Batch, ages

MAX_SAMPLES = 400
"""Maximum points of a curve over time; beyond it, every second point is removed."""


@dataclass(slots=True, kw_only=True)
class VersionFact:
    """One version of the weights."""

    lineage: int
    version: int
    published_s: float
    nbytes: int
    loads_s: list[float] = field(default_factory=list[float])
    """Seconds from its publish until an instance had loaded it, one value per load."""
    failed: int = 0
    """Number of failed loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """A notable event."""

    at_s: float
    bad: bool
    """True if it caused a loss."""
    text: str


@dataclass(slots=True)
class Spent:
    """Number of groups and tokens with the same fate."""

    groups: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.groups += 1
        self.tokens += tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Mean number of groups in each state since the previous level, until ``at_s``."""

    at_s: float
    leased: float
    pushed: float
    occupied: float
    sealed: float


Counts = tuple[int, int, int, int]
"""Number of leased, pushed, occupied and sealed groups."""


class Levels:
    """Curve of group counts with a bounded number of points."""

    def __init__(self, most: int = MAX_SAMPLES) -> None:
        self._most = most
        self._gap_s = 0.0
        self._points: list[tuple[float, float, list[float]]] = []
        """(begin, end, seconds x groups of each state)."""
        self._now_s = 0.0
        self._counts: Counts = (0, 0, 0, 0)

    def see(self, at_s: float, counts: Counts) -> None:
        """Set the counts that apply from ``at_s`` on."""
        length = at_s - self._now_s
        if length > 0:
            if not self._points or self._points[-1][1] - self._points[-1][0] >= self._gap_s:
                self._points.append((self._now_s, self._now_s, [0.0] * 4))
            begin, _, areas = self._points[-1]
            added = [area + length * count for area, count in zip(areas, self._counts, strict=True)]
            self._points[-1] = (begin, at_s, added)
            if len(self._points) > self._most:
                self._halve()
        self._now_s, self._counts = at_s, counts

    def _halve(self) -> None:
        pairs = zip(self._points[::2], self._points[1::2], strict=False)
        odd = self._points[-1:] if len(self._points) % 2 else []
        self._points = [
            (left[0], right[1], [a + b for a, b in zip(left[2], right[2], strict=True)]) for left, right in pairs
        ] + odd
        self._gap_s = 2 * (self._now_s or self._points[-1][1]) / self._most

    @property
    def points(self) -> list[Level]:
        """Return the points in order of time."""
        result = list[Level]()
        for begin, end, areas in self._points:
            leased, pushed, occupied, sealed = (area / (end - begin) for area in areas)
            result.append(Level(at_s=end, leased=leased, pushed=pushed, occupied=occupied, sealed=sealed))
        return result


@dataclass(slots=True, kw_only=True)
class Facts:
    """Everything that the pages need from a trace."""

    run: str = ""
    began_unix_s: float = 0.0
    seconds: float = 0.0
    incarnations: int = 0
    max_staleness: int = 0
    bound: str = ""
    on_overdue: str = ""
    batch_size: int = 0
    group_size: int = 0
    steps: list[Batch] = field(default_factory=list[Batch])
    undone_steps: int = 0
    """Tokens that were consumed and then rolled back."""
    undone_tokens: int = 0
    versions: list[VersionFact] = field(default_factory=list[VersionFact])
    """Published versions that were not rolled back, in ascending order."""
    pushed: Spent = field(default_factory=Spent)
    released: dict[str, Spent] = field(default_factory=dict[str, Spent])
    """Released groups by reason, such as ``surplus`` or ``filtered``; tokens as far as they are known."""
    dropped: dict[str, Spent] = field(default_factory=dict[str, Spent])
    rejects: Counter[str] = field(default_factory=Counter[str])
    """Number of rejected requests by code."""
    levels: Levels = field(default_factory=Levels)
    happenings: list[Happening] = field(default_factory=list[Happening])
    checkpoints: int = 0
    closed: str = ""
    """Reason of the orderly end of the last incarnation; empty if it still runs or crashed."""

    @property
    def ages(self) -> dict[int, int]:
        """Number of trained groups by staleness."""
        return dict(sorted(ages(self.steps).items()))

    @property
    def trained(self) -> int:
        """Number of trained tokens without masked ones."""
        return sum(step.trained_tokens for step in self.steps)

    @property
    def masked(self) -> int:
        """Number of tokens that were masked because they were too old to train."""
        return sum(step.masked_tokens for step in self.steps)

    @property
    def waited_s(self) -> float:
        """Seconds in which the trainer had no batch to work on."""
        return sum(step.waited_s for step in self.steps)
