"""Validate a trace: read ``trace.jsonl`` line by line and check it against docs/consistency.md.

Two layers. This module checks the file: hashes, numbers, incarnations and well-formed lines. ``rules`` recounts the
ledger's transitions with counters of its own, without any code of the ledger.

Memory is bounded by the live groups, and by the batches that a rollback to the oldest kept checkpoint could restore.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from staleflow.trace.audit.rules import Recount
from staleflow.trace.audit.state import Rule
from staleflow.trace.events import SCHEMA, AnyEvent, Open
from staleflow.trace.writer import NO_HASH

MAX_VIOLATIONS = 1_000
"""Maximum number of violations kept with their reason; all of them are counted."""


class FileRule(StrEnum):
    """Rules of the file itself."""

    LINE = "every line is a well-formed event of this schema"
    CHAIN = "each line carries the hash of everything before it"
    SEQUENCE = "seq counts from 1 without a gap"
    RUN = "one run; incarnations rise by one, each begins with open; monotonic time never goes back inside one"


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation of a rule."""

    rule: Rule | FileRule
    seq: int
    why: str


@dataclass(slots=True)
class AuditReport:
    """The findings of an audit, and the size of the checked trace."""

    lines: int = 0
    num_violations: int = 0
    violations: list[Violation] = field(default_factory=list[Violation])
    """The first ``MAX_VIOLATIONS``."""
    violated: Counter[str] = field(default_factory=Counter[str])
    """Number of all violations, by name of the rule."""
    events: Counter[str] = field(default_factory=Counter[str])
    """Lines of each event; ``release`` and ``drop`` also by reason, ``reject`` by code."""
    checks: Counter[str] = field(default_factory=Counter[str])
    """Number of checks, by name of the rule."""
    states: dict[str, int] = field(default_factory=dict[str, int])
    staleness: dict[int, int] = field(default_factory=dict[int, int])
    """Groups sealed, by step - version."""
    steps: int = 0
    tokens: int = 0
    masked_tokens: int = 0
    closed: bool = False
    """True if the last incarnation closed in order."""
    last_hash: str = ""
    """The last hash of the chain, which identifies the whole file."""

    @property
    def ok(self) -> bool:
        return not self.num_violations

    @property
    def unchecked(self) -> list[str]:
        """Rules that had nothing to check in this trace."""
        return [rule.name for rule in (*FileRule, *Rule) if not self.checks[rule.name]]


class _Common(msgspec.Struct, frozen=True):
    """Fields of every line."""

    schema: int
    run: str
    inc: int
    seq: int
    t: int
    m: int
    ev: str
    h: str


_common = msgspec.json.Decoder(_Common)
_event = msgspec.json.Decoder(AnyEvent)


class Auditor:
    """Takes lines one at a time; ``report`` may be called at any moment."""

    def __init__(self) -> None:
        self._report = AuditReport()
        self._recount = Recount(self._fail, self._report.checks)
        self._previous = NO_HASH
        self._last: _Common | None = None

    def feed(self, line: bytes) -> None:
        """Check one line, without its line feed."""
        self._report.lines += 1
        self._report.checks[FileRule.LINE.name] += 1
        try:
            common, event = _common.decode(line), _event.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            seq = 1 if self._last is None else self._last.seq + 1
            self._fail(FileRule.LINE, f"line {self._report.lines} is not an event: {error}", seq)
            return
        if common.schema != SCHEMA:
            self._fail(FileRule.LINE, f"schema {common.schema}; this auditor knows {SCHEMA}", common.seq)
            return
        self._chain(line, common)
        self._numbers(common, event)
        self._last = common
        self._count(event, common.ev)
        self._recount.event(event, common.seq)

    def report(self) -> AuditReport:
        """Return the findings so far."""
        recount, report = self._recount, self._report
        recount.finish()
        report.states = recount.state_counts()
        report.staleness = dict(sorted(recount.staleness.items()))
        report.steps, report.tokens, report.masked_tokens = recount.steps, recount.tokens, recount.masked
        report.closed = recount.closed
        report.last_hash = self._previous
        return report

    def _chain(self, line: bytes, common: _Common) -> None:
        self._report.checks[FileRule.CHAIN.name] += 1
        body, mark, tail = line.rpartition(b',"h":"')
        expected = hashlib.sha256(self._previous.encode() + body).hexdigest()[:16]
        if not mark or tail != expected.encode() + b'"}':
            self._fail(FileRule.CHAIN, f"hash {common.h}, not {expected}", common.seq)
        self._previous = common.h

    def _numbers(self, common: _Common, event: AnyEvent) -> None:
        checks, last = self._report.checks, self._last
        checks[FileRule.SEQUENCE.name] += 1
        checks[FileRule.RUN.name] += 1
        expected = 1 if last is None else last.seq + 1
        if common.seq != expected:
            self._fail(FileRule.SEQUENCE, f"line {self._report.lines} has seq {common.seq}, not {expected}", common.seq)
        inc = 0 if last is None else last.inc
        if isinstance(event, Open):
            if common.inc != inc + 1:
                self._fail(FileRule.RUN, f"incarnation {common.inc} opens after {inc}", common.seq)
        elif common.inc != inc:
            self._fail(FileRule.RUN, f"incarnation {common.inc} did not open", common.seq)
        elif last is not None and common.m < last.m:
            self._fail(FileRule.RUN, "monotonic time goes back", common.seq)
        if last is not None and common.run != last.run:
            self._fail(FileRule.RUN, f"run {common.run} inside run {last.run}", common.seq)

    def _count(self, event: AnyEvent, name: str) -> None:
        events = self._report.events
        events[name] += 1
        reason = getattr(event, "why", None) if name in ("release", "drop") else getattr(event, "code", None)
        if reason is not None:
            events[f"{name}:{reason}"] += 1

    def _fail(self, rule: Rule | FileRule, why: str, seq: int) -> None:
        report = self._report
        report.num_violations += 1
        report.violated[rule.name] += 1
        if len(report.violations) < MAX_VIOLATIONS:
            report.violations.append(Violation(rule, seq, why))


def audit(path: Path, *, growing: bool = False) -> AuditReport:
    """Check a whole file. Raise ``OSError`` if it cannot be read. ``growing`` skips a last line without a line feed,
    which is still being written, unless the trace is closed."""
    auditor = Auditor()
    for line, whole in _lines(path):
        if whole:
            auditor.feed(line)
        elif not growing or auditor.report().closed:
            auditor.feed(line + b"\0")  # a torn line is not an event, even if its remainder looks like one
    return auditor.report()


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield each line without its line feed, and whether it had one."""
    with path.open("rb") as file:
        for raw in file:
            yield raw.removesuffix(b"\n"), raw.endswith(b"\n")
