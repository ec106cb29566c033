"""Measure the time of one decision: ``decide`` on a snapshot of a fleet after a new version was published.

    python -m bench.decisions                       every routing at 8 to 1,024 instances
    python -m bench.decisions --instances 1024 --repeat 200

Half of the instances hold groups already, all have a fitted cost, and 128 groups are next and may start.
"""

import argparse
import statistics
import time
from typing import get_args

from rich.console import Console
from rich.table import Table

from bench.progress import tracked
from staleflow.protocols.consistency.ids import GroupId, Lineage, Version, WorkerId
from staleflow.protocols.coordination.decide import Strategies, decide
from staleflow.protocols.coordination.routing import Routing
from staleflow.protocols.coordination.view import Cost, Instance, Next, Snapshot
from staleflow.servers.scheduler.coordination.snapshots import MAX_STARTS


def fleet(instances: int) -> Snapshot:
    """Engines of two kinds, every other one half full."""
    observed = [
        Instance(
            worker=WorkerId(f"rollout-{n}"),
            lineage=Lineage(0),
            version=Version(9),
            usable=True,
            behind=False,
            pulling=False,
            held=16 * (n % 2),
            capacity=32,
            running=16 * (n % 2),
            slots=32,
            kv_tokens=24_000 * (n % 2),
            kv_capacity=1_000_000,
            tokens_per_s=1_000.0,
            cost=Cost(k1=7e-8, k2=0.0115 * (1 + n % 3), k3=1.2e-4, k4=9e-4),
        )
        for n in range(instances)
    ]
    following = tuple(Next(group=GroupId(n), length=200.0 + 37 * (n % 50)) for n in range(MAX_STARTS))
    return Snapshot(
        lineage=Lineage(0),
        version=Version(9),
        instances=tuple(observed),
        room={Version(9): 4 * instances},
        next=following,
        group_size=1,
        batch_size=2 * instances,
        max_staleness=2,
        leased=8 * instances,
    )


def measure(snapshot: Snapshot, strategies: Strategies, repeat: int) -> list[float]:
    """Milliseconds of each of that many decisions, ascending."""
    took: list[float] = []
    for _ in range(repeat):
        started = time.perf_counter()
        decide(snapshot, strategies)
        took.append(1000 * (time.perf_counter() - started))
    return sorted(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="*", default=[8, 64, 256, 1024])
    parser.add_argument("--repeat", type=int, default=50)
    chosen = parser.parse_args()
    table = Table("routing", "instances", "median ms", "p90 ms", "best ms", title="one decision")
    for routing in get_args(Routing):
        strategies = Strategies(
            routing=routing,
            min_gain=0.1,
            sync="greedy",
            sync_threshold=8,
            migration="none",
            migration_gap=2.0,
            admission="just_in_time",
        )
        for instances in tracked(routing, chosen.instances, lambda count: f"{count} instances"):
            took = measure(fleet(instances), strategies, chosen.repeat)
            p90 = took[int(0.9 * (len(took) - 1))]
            table.add_row(routing, str(instances), *(f"{ms:.2f}" for ms in (statistics.median(took), p90, took[0])))
    Console().print(table)


if __name__ == "__main__":
    main()
