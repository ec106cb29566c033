"""The output of the coordination benchmark: one table for each row of targets."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

HEAD = ("run", "target", "measured", "bound that applies", "met")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One comparison; with ``met`` None it has no target and serves as a reference."""

    what: str
    target: str = ""
    measured: str
    bound: str = ""
    met: bool | None = None
    possible: bool = True
    """True if the bound that applies leaves room for the target."""
    values: dict[str, float] = field(default_factory=dict[str, float])
    """The measured numbers, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A row of targets. Not ``judged``: the targets were set for runs of another kind and only serve as a reference."""

    title: str
    lines: Sequence[Line]
    judged: bool = True

    def markdown(self) -> str:
        rows = [HEAD, ("---",) * len(HEAD), *(self._cells(line) for line in self.lines)]
        return "\n".join((f"## {self.title}", "", *(f"| {' | '.join(row)} |" for row in rows)))

    def _cells(self, line: Line) -> tuple[str, ...]:
        met = "" if line.met is None else "yes" if line.met else "**no**" if line.possible else "cannot be"
        beside = f"({met.strip('*')})" if met else ""
        return (line.what, line.target, line.measured, line.bound, met if self.judged else beside)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), spread)

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"
