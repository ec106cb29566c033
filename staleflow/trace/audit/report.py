"""Is a trace true? Reads ``trace.jsonl`` line by line and checks it against docs/consistency.md.

Two layers. Here: the file itself, that is hashes, numbers, incarnations and well-formed lines. In ``audit_rules``: what
the lines say the ledger did, recounted with counters of its own; nothing of the ledger's code is asked.

Memory is that of the live groups, and of what a rollback to the oldest kept checkpoint could bring back.
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
"""Violations that are kept with their reason; all of them are counted."""


class FileRule(StrEnum):
    """What must hold for the file."""

    LINE = "every line is a well-formed event of this schema"
    CHAIN = "each line carries the hash of everything before it"
    SEQUENCE = "seq counts from 1 without a gap"
    RUN = "one run; incarnations rise by one, each begins with open; monotonic time never goes back inside one"


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is not as it must be."""

    rule: Rule | FileRule
    seq: int
    why: str


@dataclass(slots=True)
class AuditReport:
    """What was found, and how much there was to find it in."""

    lines: int = 0
    num_violations: int = 0
    violations: list[Violation] = field(default_factory=list[Violation])
    """The first ``MAX_VIOLATIONS``."""
    violated: Counter[str] = field(default_factory=Counter[str])
    """How often each rule, by name, was violated: all of it."""
    events: Counter[str] = field(default_factory=Counter[str])
    """Lines of each event; ``release`` and ``drop`` also by reason, ``reject`` by code."""
    checks: Counter[str] = field(default_factory=Counter[str])
    """How often each rule, by name, had something to check."""
    states: dict[str, int] = field(default_factory=dict[str, int])
    staleness: dict[int, int] = field(default_factory=dict[int, int])
    """Groups sealed, by step - version."""
    steps: int = 0
    tokens: int = 0
    masked_tokens: int = 0
    closed: bool = False
    """The last incarnation ended in order."""
    last_hash: str = ""
    """What the last line's chain comes to: it names the whole file."""

    @property
    def ok(self) -> bool:
        return not self.num_violations

    @property
    def unchecked(self) -> list[str]:
        """Rules that had nothing to check in this trace."""
        return [rule.name for rule in (*FileRule, *Rule) if not self.checks[rule.name]]


class _Common(msgspec.Struct, frozen=True):
    """The fields that every line has."""

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
    """Takes lines one at a time; ``report`` may be asked for at any moment."""

    def __init__(self) -> None:
        self._report = AuditReport()
        self._recount = Recount(self._fail, self._report.checks)
        self._previous = NO_HASH
        self._last: _Common | None = None

    def feed(self, line: bytes) -> None:
        """One line, without its line feed."""
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
        """The findings up to now."""
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
    """Check a whole file. ``OSError`` if it cannot be read. ``growing``: unless the trace is closed, a last line
    without its end is being written, and left out."""
    auditor = Auditor()
    for line, whole in _lines(path):
        if whole:
            auditor.feed(line)
        elif not growing or auditor.report().closed:
            auditor.feed(line + b"\0")  # a torn line is not an event, even if what is left of it looks like one
    return auditor.report()


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Each line without its line feed, and whether it had one."""
    with path.open("rb") as file:
        for raw in file:
            yield raw.removesuffix(b"\n"), raw.endswith(b"\n")
