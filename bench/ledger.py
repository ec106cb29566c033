"""Measure the cost of one operation of the ledger, and that it does not depend on the number of live groups.

The ledger is filled with ``live`` groups (a third leased, a third pushed, a third occupied), then groups are reserved,
pushed and occupied, and a batch is sealed and consumed. Beside it the raw limit of the same shape: one dict insert, one
heap push and one tuple. Times are CPU times of this thread, so that other processes do not count.

    python bench/ledger.py [--live 100 --live 10000] [--json]
"""

import gc
import heapq
import json
import statistics
import time
from collections.abc import Iterable

import click
from rich.console import Console
from rich.table import Table

from bench.progress import tracked
from staleflow.protocols.consistency.events import Consume, Event, Join, Occupy, Publish, Push, Renew, Reserve
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Segment, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.machine import Machine

SIZES = (100, 10_000, 100_000, 1_000_000)
OPERATIONS = 3_000
ROUNDS = 5
TERM = TrainerTerm(1)
WORKERS = tuple(WorkerId(f"rollout-{number}.0000") for number in range(256))
OLDEST = Version(0)


def reserve(group: int) -> Reserve:
    return Reserve(group=GroupId(group), worker=WORKERS[group % len(WORKERS)], version=OLDEST)


def push(group: int) -> Push:
    return Push(
        group=GroupId(group),
        lease=LeaseId(group + 1),
        worker=WORKERS[group % len(WORKERS)],
        shard=0,
        sha="0" * 64,
        nbytes=4096,
        truncated=False,
        segments=(Segment(Lineage(0), OLDEST, 512),),
        sequence_tokens=1024,
    )


def occupy(group: int) -> Occupy:
    return Occupy(group=GroupId(group), lease=LeaseId(group + 1))


def filled(live: int, max_staleness: int, batch_size: int) -> Machine:
    """A machine with ``live`` groups in flight, with a batch too large to be sealed."""
    machine = Machine(Limits(max_staleness=max_staleness, batch_size=batch_size))
    machine.apply(Join(trainer=WorkerId("trainer"), lineage=Lineage(0), version=Version(0)), 0)
    machine.apply(Publish(trainer_term=TERM, sha="0" * 64, nbytes=1), 0)
    for group in range(live):
        machine.apply(reserve(group), 0)
        if group % 3:
            machine.apply(push(group), 0)
    for group in range(2, live, 3):
        machine.apply(occupy(group), 0)
    machine.take_dirty()
    return machine


def timed(machine: Machine, events: Iterable[Event]) -> float:
    """Microseconds for one event."""
    apply, todo = machine.apply, list(events)
    gc.collect()
    gc.disable()
    begin = time.thread_time()
    for event in todo:
        apply(event, 0)
    spent = time.thread_time() - begin
    gc.enable()
    return spent / len(todo) * 1e6


def raw(live: int) -> float:
    """Microseconds for one dict insert, one heap push and one tuple, at the same size."""
    table = {number: [number] for number in range(live)}
    heap = [(number, number) for number in range(live)]
    gc.collect()
    gc.disable()
    begin = time.thread_time()
    for number in range(live, live + OPERATIONS):
        table[number] = [number]
        heapq.heappush(heap, (number, number))
        _ = (number, heap)
    spent = time.thread_time() - begin
    gc.enable()
    return spent / OPERATIONS * 1e6


def lifecycle(live: int) -> dict[str, float]:
    """Microseconds a reserve, push and occupy with ``live`` groups alive; no batch is sealed, so no group leaves."""
    batch_size = live + ROUNDS * OPERATIONS + 1
    machine = filled(live, max_staleness=2, batch_size=batch_size)
    rounds: dict[str, list[float]] = {"reserve": [], "push": [], "occupy": [], "renew": []}
    for number in range(ROUNDS):
        groups = range(live + number * OPERATIONS, live + (number + 1) * OPERATIONS)
        rounds["reserve"].append(timed(machine, map(reserve, groups)))
        rounds["push"].append(timed(machine, map(push, groups)))
        rounds["occupy"].append(timed(machine, map(occupy, groups)))
        rounds["renew"].append(timed(machine, [Renew(worker=worker) for worker in WORKERS]))
    return {name: statistics.median(values) for name, values in rounds.items()}


def training(live: int) -> float:
    """Microseconds that seal and consume cost a trained group: one batch is a third of all live groups."""
    batch_size = max(1, live // 3)
    machine = filled(0, max_staleness=2, batch_size=batch_size)
    for group in range(3 * batch_size):
        machine.apply(reserve(group), 0)
    for group in range(batch_size):
        machine.apply(push(group), 0)
        if group < batch_size - 1:
            machine.apply(occupy(group), 0)
    spent = timed(machine, [occupy(batch_size - 1)])
    batch = machine.sealed_batch(Step(0))
    assert batch is not None
    event = Consume(batch=batch.batch, step=Step(0), trainer_term=TERM, sha="0" * 64, nbytes=1)
    return (spent + timed(machine, [event])) / batch_size


def measure(live: int) -> dict[str, float]:
    result = lifecycle(live)
    result["mean"] = (result["reserve"] + result["push"] + result["occupy"]) / 3
    result["seal+consume"] = training(live)
    result["raw"] = raw(live)
    return result


def show(results: dict[int, dict[str, float]]) -> None:
    names = ["reserve", "push", "occupy", "mean", "renew", "seal+consume", "raw"]
    table = Table(title="the ledger, microseconds an operation (seal+consume: a trained group)")
    table.add_column("live groups", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column(f"mean / mean at {min(results):,}", justify="right")
    first = results[min(results)]["mean"]
    for live, result in results.items():
        table.add_row(f"{live:,}", *(f"{result[name]:.2f}" for name in names), f"{result['mean'] / first:.2f}")
    Console(width=120).print(table)


@click.command()
@click.option("--live", multiple=True, type=click.IntRange(min=1), help="Groups alive; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(live: tuple[int, ...], as_json: bool) -> None:
    """Print the cost of one operation of the ledger at several sizes."""
    results = {size: measure(size) for size in tracked("live groups", live or SIZES)}
    if as_json:
        click.echo(json.dumps(results))
    else:
        show(results)


if __name__ == "__main__":
    main()
