"""Verify the promises in run after run full of faults, each with another seed, up to a target number of events.

    python -m bench.soak                                    10^7 events, two processes
    python -m bench.soak --events 1000000 --first 100 --processes 1 --publish
    python -m bench.soak --minutes 15                       stops after that time; so does Ctrl-C
    python -m bench.soak --kept runs/soak.jsonl             continues that soak, as long as the code is the same

Every run is the shipped servers and clients in virtual time (``staleflow.sim.faults``). The first run that breaks a
rule ends the soak with its seed, the command that reproduces it, and the story of the group; exit code 1. ``--publish``
writes the table into bench/results/.
"""

import argparse
import hashlib
import itertools
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

import staleflow
from staleflow.sim.faults.__main__ import describe
from staleflow.sim.faults.plan import KINDS
from staleflow.sim.faults.reconcile import Rule
from staleflow.sim.faults.run import Outcome, run_seed
from staleflow.sim.virtual import BEGIN_S
from staleflow.trace.audit.report import FileRule
from staleflow.trace.audit.state import Rule as AuditRule

RESULTS = Path(__file__).parent / "results"
PER_SEED = 10_000


class Totals:
    """Totals of all runs together."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.seeds: set[int] = set()
        self.events = 0
        self.virtual_s = 0.0
        self.spent_s = 0.0
        self.faults: Counter[str] = Counter()
        self.checks: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def add(self, outcome: Outcome, spent_s: float) -> None:
        """Add one run that kept every promise, and the seconds since the previous one."""
        self.spent_s += spent_s
        self.seeds.add(outcome.seed)
        self.events += outcome.events
        self.virtual_s += outcome.seconds - BEGIN_S
        self.faults += outcome.faults
        self.checks += outcome.checks
        self.counts += outcome.counts

    def unmet(self) -> list[str]:
        """Faults that never happened and rules that had no case to check."""
        faults = [kind for kind in KINDS if not self.faults[kind]]
        rules = [rule.name for rule in (*FileRule, *AuditRule, *Rule)]
        return faults + [rule for rule in rules if not self.checks[rule]]


class Head(msgspec.Struct):
    """First line of a file of outcomes."""

    code: str
    per_seed: int


class Seen(msgspec.Struct):
    """Each other line: one run that kept every promise, and the seconds since the previous line."""

    outcome: Outcome
    spent_s: float


class Kept:
    """Outcomes of the same code, in a file, so that an interrupted soak continues. Other outcomes are discarded."""

    def __init__(self, path: Path, per_seed: int) -> None:
        self._path = path
        self.seen: list[Seen] = []
        head = Head(code=code(), per_seed=per_seed)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if lines and msgspec.json.decode(lines[0], type=Head) == head:
            observed = msgspec.json.Decoder(Seen, dec_hook=_counter)
            self.seen = [observed.decode(line) for line in lines[1:] if line.endswith(b"\n")]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in (head, *self.seen)))

    def add(self, outcome: Outcome, spent_s: float) -> None:
        """Append the outcome at once, so that it survives an interruption."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(Seen(outcome, spent_s)) + b"\n")


def _counter(_: type, found: dict[str, int]) -> Counter[str]:
    return Counter(found)


def code() -> str:
    """Digest of the product's own files: equal digests give equal runs."""
    digest, root = hashlib.sha256(), Path(staleflow.__file__).parent
    folders = sorted(os.walk(root, followlinks=True))
    for path in (Path(folder, name) for folder, _, names in folders for name in sorted(names) if name.endswith(".py")):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def runs(first: int, per_seed: int, processes: int, without: Container[int]) -> Iterator[Outcome]:
    """Endless outcomes, one after another, in no fixed order, of seeds that have not run yet."""
    work = partial(run_seed, events=per_seed)
    if processes == 1:
        yield from map(work, (seed for seed in itertools.count(first) if seed not in without))
        return
    deaf = (signal.SIGINT, signal.SIG_IGN)
    with multiprocessing.get_context("spawn").Pool(processes, signal.signal, deaf, maxtasksperchild=50) as pool:
        for start in itertools.count(first, 1_000):
            seeds = [seed for seed in range(start, start + 1_000) if seed not in without]
            yield from pool.imap_unordered(work, seeds)


def soak(
    work: Iterator[Outcome], totals: Totals, kept: Kept | None, events: int, most_s: float, console: Console
) -> Outcome | None:
    """Run until the number of events, the time limit or Ctrl-C. If a run breaks a rule, return that run."""
    ends_s = totals.spent_s + most_s
    told_s = time.monotonic()
    with suppress(KeyboardInterrupt):
        while totals.events < events and totals.spent_s <= ends_s:
            outcome, now_s = next(work), time.monotonic()
            if not outcome.ok:
                return outcome
            if kept is not None:
                kept.add(outcome, now_s - told_s)
            totals.add(outcome, now_s - told_s)
            told_s = now_s
            console.print(
                f"{totals.events:,} events in {len(totals.seeds)} runs, {sum(totals.faults.values()):,} faults, "
                f"{totals.events / totals.spent_s:,.0f} events/s, {totals.spent_s / 60:.0f} min"
            )
    return None


def page(totals: Totals, command: str) -> str:
    """The result as it is committed."""
    hardware = f"{multiprocessing.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    rows = [
        "# Soak: the deterministic simulation of faults\n",
        f"{date.today()} · {hardware} · `{command}` · seeds from {totals.first} on\n",
        f"**{totals.events:,} events of the trace in {len(totals.seeds)} runs, {totals.virtual_s / 3600:,.1f} h of "
        f"virtual time, {totals.spent_s / 60:,.0f} min of real time. Violations: 0.**",
    ]
    unmet = ", ".join(totals.unmet()) or "none"
    rows += [f"\nFaults that never happened, rules that never had anything to check: {unmet}.\n"]
    for title, counter in (("fault", totals.faults), ("rule: checks", totals.checks), ("seen", totals.counts)):
        rows += [f"| {title} | count |", "|---|---:|"]
        rows += [f"| {name} | {count:,} |" for name, count in sorted(counter.items())]
        rows += [""]
    return "\n".join(rows)


def main() -> int:
    """Exit code 0 when every run kept every promise."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak")
    parser.add_argument("--events", type=int, default=10_000_000, help="lines of traces in all")
    parser.add_argument("--per-seed", type=int, default=PER_SEED)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no new run after so long")
    parser.add_argument("--kept", type=Path, help="a file of outcomes: what is in it is not run again")
    parser.add_argument("--publish", action="store_true", help="write the table into bench/results/")
    given = parser.parse_args()
    totals = Totals(given.first)
    kept = Kept(given.kept, given.per_seed) if given.kept is not None else None
    for one in kept.seen if kept is not None else ():
        totals.add(one.outcome, one.spent_s)
    work = runs(given.first, given.per_seed, given.processes, totals.seeds)
    broken = soak(work, totals, kept, given.events, given.minutes * 60, Console(highlight=False))
    if broken is not None:
        sys.stdout.write(describe(broken))
        return 1
    command = "python -m bench.soak " + " ".join(word for word in sys.argv[1:] if word != "--publish")
    text = page(totals, command.strip())
    sys.stdout.write(text)
    if given.publish:
        cores = multiprocessing.cpu_count()
        (RESULTS / f"{date.today():%Y-%m}-{cores}-cores-soak.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
