"""How long do the promises hold? Run after run full of faults, each another seed, until there were enough events.

    python -m bench.soak                                    10^7 events, two processes
    python -m bench.soak --events 1000000 --first 100 --processes 1 --publish
    python -m bench.soak --minutes 15                       as many as there is time for; so does Ctrl-C

Every run is the shipped servers and clients in virtual time (``staleflow.sim.faults``). The first run that breaks a
rule ends the soak with its seed, the command that shows it again, and the story of the group; exit code 1.
``--publish`` writes the table into bench/results/.
"""

import argparse
import itertools
import multiprocessing
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path

from rich.console import Console

from staleflow.runtime.audit import FileRule
from staleflow.runtime.audit_books import Rule as AuditRule
from staleflow.sim.faults.__main__ import told
from staleflow.sim.faults.plan import KINDS
from staleflow.sim.faults.reconcile import Rule
from staleflow.sim.faults.run import Outcome, run_seed
from staleflow.sim.faults.virtual import BEGIN_S

RESULTS = Path(__file__).parent / "results"
PER_SEED = 10_000


class Totals:
    """What all runs together did."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.seeds = 0
        self.events = 0
        self.virtual_s = 0.0
        self.faults: Counter[str] = Counter()
        self.checks: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> None:
        """One run that kept every promise."""
        self.seeds += 1
        self.events += outcome.events
        self.virtual_s += outcome.seconds - BEGIN_S
        self.faults += outcome.faults
        self.checks += outcome.checks
        self.counts += outcome.counts

    def unmet(self) -> list[str]:
        """Faults that never happened and rules that never had anything to check."""
        faults = [kind for kind in KINDS if not self.faults[kind]]
        return faults + [rule.name for rule in (*FileRule, *AuditRule, *Rule) if not self.checks[rule.name]]


def runs(first: int, per_seed: int, processes: int) -> Iterator[Outcome]:
    """One outcome after another, in no fixed order, for ever."""
    work = partial(run_seed, events=per_seed)
    if processes == 1:
        yield from map(work, itertools.count(first))
        return
    deaf = (signal.SIGINT, signal.SIG_IGN)
    with multiprocessing.get_context("spawn").Pool(processes, signal.signal, deaf, maxtasksperchild=50) as pool:
        for start in itertools.count(first, 1_000):
            yield from pool.imap_unordered(work, range(start, start + 1_000))


def soak(work: Iterator[Outcome], totals: Totals, events: int, most_s: float, console: Console) -> Outcome | None:
    """Run until there were enough events, or the time is over, or Ctrl-C; or one run broke a rule: then that one."""
    began = time.monotonic()
    with suppress(KeyboardInterrupt):
        for outcome in work:
            if not outcome.ok:
                return outcome
            totals.add(outcome)
            spent = time.monotonic() - began
            console.print(
                f"{totals.events:,} events in {totals.seeds} runs, {sum(totals.faults.values()):,} faults, "
                f"{totals.events / spent:,.0f} events/s, {spent / 60:.0f} min"
            )
            if totals.events >= events or spent > most_s:
                break
    return None


def page(totals: Totals, spent_s: float, command: str) -> str:
    """The result as it is committed."""
    hardware = f"{multiprocessing.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    rows = [
        "# Soak: the deterministic simulation of faults\n",
        f"{date.today()} · {hardware} · `{command}` · seeds from {totals.first} on\n",
        f"**{totals.events:,} events of the trace in {totals.seeds} runs, {totals.virtual_s / 3600:,.1f} h of virtual "
        f"time, {spent_s / 60:,.0f} min of real time. Violations: 0.**",
    ]
    unmet = ", ".join(totals.unmet()) or "none"
    rows += [f"\nFaults that never happened, rules that never had anything to check: {unmet}.\n"]
    for title, counter in (("fault", totals.faults), ("rule: checks", totals.checks), ("seen", totals.counts)):
        rows += [f"| {title} | count |", "|---|---:|"]
        rows += [f"| {name} | {count:,} |" for name, count in sorted(counter.items())]
        rows += [""]
    return "\n".join(rows)


def main() -> int:
    """0 when every run kept every promise."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak")
    parser.add_argument("--events", type=int, default=10_000_000, help="lines of traces in all")
    parser.add_argument("--per-seed", type=int, default=PER_SEED)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no new run after so long")
    parser.add_argument("--publish", action="store_true", help="write the table into bench/results/")
    given = parser.parse_args()
    console, began = Console(highlight=False), time.monotonic()
    totals, work = Totals(given.first), runs(given.first, given.per_seed, given.processes)
    broken = soak(work, totals, given.events, given.minutes * 60, console)
    if broken is not None:
        sys.stdout.write(told(broken))
        return 1
    command = "python -m bench.soak " + " ".join(word for word in sys.argv[1:] if word != "--publish")
    text = page(totals, time.monotonic() - began, command.strip())
    sys.stdout.write(text)
    if given.publish:
        cores = multiprocessing.cpu_count()
        (RESULTS / f"{date.today():%Y-%m}-{cores}-cores-soak.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
