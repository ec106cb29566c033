"""Measure the cost of killed servers and verify that no acknowledged data is lost: the campaigns behind tests/process.

Each campaign is that of a test with larger numbers, against real processes on this machine, and makes the same
assertions. ``python -m bench.faults`` runs all of them; an argument selects one: kills, drains, recovery, reconnect.
"""

import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import uvloop

from bench.progress import tracked
from staleflow.configs.schema import Durability
from tests.audit.reconcile import Rule, prove
from tests.process.kills import IN_DOUBT, NO_STALE, Tally, campaign
from tests.process.reconnecting import Recovery, Storm, recovery, storm

Rows = list[tuple[str, str]]


def kills(rounds: int, seed: int) -> Rows:
    """Send kill -9 to every server, in half of the rounds with synced commits and in half with unsynced ones."""
    rows: Rows = []
    parts = [_campaign(rounds // 2, seed, signal.SIGKILL, synced) for synced in (True, False)]
    for durability, tally in zip(("power", "process"), parts, strict=True):
        prove(tally.report, without=NO_STALE)
        rows += [(f"durability = {durability}: {name}", value) for name, value in _of_campaign(tally)]
    doubtful = sum(count > 0 for tally in parts for count in tally.in_doubt)
    share = doubtful / sum(len(tally.in_doubt) for tally in parts)
    assert share >= IN_DOUBT, f"void: {share:.0%} of the kills left anything in doubt"
    return [*rows, ("kills that left something committed and unacknowledged, in all", f"{share:.0%}")]


def drains(rounds: int, seed: int) -> Rows:
    """Send SIGTERM to every server under load."""
    tally = _campaign(rounds, seed, signal.SIGTERM, False)
    prove(tally.report, without=NO_STALE)
    assert tally.codes == {0: rounds}
    ends = sorted(tally.end_s)
    rows = _of_campaign(tally)
    return [
        *rows,
        ("exit codes", f"{dict(tally.codes)}"),
        ("gone after", f"{statistics.median(ends):.2f} s, at most {ends[-1]:.2f} s"),
    ]


def _campaign(rounds: int, seed: int, number: signal.Signals, synced: bool) -> Tally:
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        durability: Durability = "power" if synced else "process"
        return uvloop.run(
            campaign(Path(folder) / "run", rounds=rounds, seed=seed, number=number, durability=durability)
        )


def _of_campaign(tally: Tally) -> Rows:
    restarts = sorted(tally.restart_s)
    rows = [("ends", f"{tally.kills.total()}: {dict(sorted(tally.kills.items()))}")]
    if tally.in_doubt:
        rows.append(("left something in doubt", f"{tally.doubtful:.0%}, {sum(tally.in_doubt)} records and versions"))
    return [
        *rows,
        ("pushes acknowledged, lost, changed", f"{tally.acknowledged}, 0, 0"),
        ("steps trained, lost, doubled", f"{tally.events['consume']}, 0, 0"),
        (
            "checks of ACKED_KEPT, KEPT_BYTES",
            f"{tally.report.checks[Rule.ACKED_KEPT]}, {tally.report.checks[Rule.KEPT_BYTES]}",
        ),
        ("answers again after", f"{statistics.median(restarts):.2f} s, at most {restarts[-1]:.2f} s"),
        ("wall time", f"{tally.wall_s:.0f} s"),
    ]


def recover(records: int) -> Rows:
    """Start a scheduler and a trajectory server with that many live records."""
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        result: Recovery = uvloop.run(recovery(Path(folder) / "run", records=records))
    assert result.records >= records
    return [
        ("live records", f"{result.records}"),
        *((f"{name} after", _limited(s, result.LIMIT_S, result.cpu_s[name])) for name, s in result.restart_s.items()),
        ("pushed at", f"{result.pushes_per_s:.0f} groups/s"),
    ]


def _limited(seconds: float, limit_s: float, cpu_s: float) -> str:
    message = f"{seconds:.2f} s, {cpu_s:.2f} s of them computing"
    return message if seconds <= limit_s else f"{message}: MISSED, the limit is {limit_s:g} s"


def reconnect(clients: int) -> Rows:
    """Clients that reconnect to a killed scheduler, and the effect on the clients that were connected before."""
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        result: Storm = uvloop.run(storm(Path(folder) / "run", clients=clients))
    assert result.back == clients
    assert result.back_s <= result.LIMIT_S, result
    assert result.after_p99_ms <= result.MAX_TIMES * result.before_p99_ms, result
    return [
        ("clients that are back", f"{result.back} of {clients}"),
        ("the last one, after the server answers", f"{result.back_s:.2f} s"),
        ("p99 of the others before, meanwhile", f"{result.before_p99_ms:.1f} ms, {result.after_p99_ms:.1f} ms"),
    ]


JOBS: dict[str, Callable[[int, int], Rows]] = {
    "kills": lambda scale, seed: kills(200 // scale, seed),
    "drains": lambda scale, seed: drains(max(50 // scale, 4), seed),
    "recovery": lambda scale, seed: recover(100_000 // scale),
    "reconnect": lambda scale, seed: reconnect(500 // scale),
}


@click.command(help=__doc__)
@click.argument("jobs", nargs=-1, type=click.Choice(list(JOBS)))
@click.option("--scale", default=1, show_default=True, type=click.IntRange(1, 10), help="So many times less of all.")
@click.option("--seed", default=0, show_default=True)
def main(jobs: Sequence[str], scale: int, seed: int) -> None:
    missed = False
    for job in tracked("jobs", jobs or JOBS):
        click.echo(f"\n## {job}\n\n| | |\n| --- | --- |")
        for name, value in JOBS[job](scale, seed):
            click.echo(f"| {name} | {value} |")
            missed = missed or "MISSED" in value
        sys.stdout.flush()
    sys.exit(int(missed))


if __name__ == "__main__":
    main()
