"""What a trace tells of a run, taken down as plain records: steps, waits, versions, waste, and what went wrong.

Times are seconds since the first line, by the scheduler's clock, without those in which there was none. Filled by
``staleflow.report.reading`` in one pass.
"""

from collections import Counter
from dataclasses import dataclass, field

MAX_SAMPLES = 400
"""Points of a curve over time; when there are more, every second one goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """The group that completed a batch: what its step waited for."""

    group: int
    worker: str
    version: int
    took_s: float
    """From its lease until it was ready to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFact:
    """One step that was consumed, in the history that survived."""

    step: int
    lineage: int
    sealed_s: float
    consumed_s: float
    waited_s: float
    """Its weights were published and its batch was not complete."""
    ages: dict[int, int]
    """Groups of the batch by step - version."""
    tokens: int
    masked: int
    writing_s: float
    """Mean over its groups: from the lease to the push."""
    staging_s: float
    """From the push until every stage was done."""
    queueing_s: float
    """From then until the batch was complete."""
    last: Last | None

    @property
    def age_mean(self) -> float:
        """Versions."""
        return sum(age * count for age, count in self.ages.items()) / max(sum(self.ages.values()), 1)

    @property
    def age_max(self) -> int:
        """Versions."""
        return max(self.ages, default=0)


@dataclass(slots=True, kw_only=True)
class VersionFact:
    """One version of the weights."""

    lineage: int
    version: int
    published_s: float
    nbytes: int
    loads_s: list[float] = field(default_factory=list[float])
    """From its publish until an instance had it, one a load."""
    failed: int = 0
    """Loads that did not succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that a person may want to know of."""

    at_s: float
    bad: bool
    """It cost something; else it is only told."""
    text: str


@dataclass(slots=True)
class Spent:
    """Groups and tokens that went one way."""

    groups: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.groups += 1
        self.tokens += tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Groups in each state: the mean from the level before until ``at_s``."""

    at_s: float
    leased: float
    pushed: float
    occupied: float
    sealed: float


Counts = tuple[int, int, int, int]
"""Leased, pushed, occupied, sealed."""


class Levels:
    """A curve of a bounded number of points, however long the run is."""

    def __init__(self, most: int = MAX_SAMPLES) -> None:
        self._most = most
        self._gap_s = 0.0
        self._points: list[tuple[float, float, list[float]]] = []
        """(begin, end, seconds x groups of each state)."""
        self._now_s = 0.0
        self._counts: Counts = (0, 0, 0, 0)

    def see(self, at_s: float, counts: Counts) -> None:
        """These are the counts from now on."""
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
        """In order of time."""
        found = list[Level]()
        for begin, end, areas in self._points:
            leased, pushed, occupied, sealed = (area / (end - begin) for area in areas)
            found.append(Level(at_s=end, leased=leased, pushed=pushed, occupied=occupied, sealed=sealed))
        return found


@dataclass(slots=True, kw_only=True)
class Facts:
    """Everything that the pages need of a trace."""

    run: str = ""
    began_unix_s: float = 0.0
    seconds: float = 0.0
    incarnations: int = 0
    max_staleness: int = 0
    bound: str = ""
    on_overdue: str = ""
    batch_size: int = 0
    group_size: int = 0
    steps: list[StepFact] = field(default_factory=list[StepFact])
    undone_steps: int = 0
    """Consumed, and taken back by a rollback."""
    undone_tokens: int = 0
    versions: list[VersionFact] = field(default_factory=list[VersionFact])
    """Published, in the history that survived; so in ascending order."""
    pushed: Spent = field(default_factory=Spent)
    released: dict[str, Spent] = field(default_factory=dict[str, Spent])
    """By reason. ``surplus``, ``filtered`` and the like; tokens as far as the run came to know them."""
    dropped: dict[str, Spent] = field(default_factory=dict[str, Spent])
    rejects: Counter[str] = field(default_factory=Counter[str])
    """Refused requests by code."""
    levels: Levels = field(default_factory=Levels)
    happenings: list[Happening] = field(default_factory=list[Happening])
    checkpoints: int = 0
    closed: str = ""
    """Why the last incarnation ended in order; empty if it did not, or goes on."""

    @property
    def ages(self) -> dict[int, int]:
        """Groups trained, by staleness."""
        total = Counter[int]()
        for step in self.steps:
            total.update(step.ages)
        return dict(sorted(total.items()))

    @property
    def trained(self) -> int:
        """Tokens that were trained, without the masked ones."""
        return sum(step.tokens - step.masked for step in self.steps)

    @property
    def masked(self) -> int:
        """Tokens that came too late to be trained."""
        return sum(step.masked for step in self.steps)

    @property
    def waited_s(self) -> float:
        """In which the trainer had no batch to work on."""
        return sum(step.waited_s for step in self.steps)
