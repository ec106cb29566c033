"""Measure the cost of monitoring: the scheduler's reply to `staleflow top`, and a screen drawn from it.

    python -m bench.monitor                      64, 256, 1,024 and 4,096 instances
    python -m bench.monitor --instances 1024 --json

The service is the shipped one, in this process and without its socket; every instance has attached, reports and holds
leases. A reply is built and encoded, decoded, turned into a board and drawn. The share is that of one core of the
scheduler with one viewer that sends one request a second. With many processes, further viewers get a cached reply.
"""

import argparse
import io
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid

from bench.control_plane import config_for, shape
from bench.progress import tracked
from staleflow.monitor.history import History
from staleflow.monitor.look import Look
from staleflow.monitor.model import Board, board
from staleflow.monitor.screen import dashboard
from staleflow.protocols.consistency.ids import Version, WorkerId
from staleflow.protocols.wire.codec import decode_reply, encode_reply
from staleflow.protocols.wire.messages import GetStatus, InstanceStats, Report, SchedulerStatus
from staleflow.supervisor.view import Snapshot
from tests.servers.scheduler.table import Table

REPEATS = 20


@dataclass
class Row:
    """Milliseconds of CPU, medians; bytes of one reply; and the scheduler's share of a core with one viewer."""

    instances: int
    leased: int
    answer_ms: float
    encode_ms: float
    nbytes: int
    decode_ms: float
    board_ms: float
    draw_ms: float
    scheduler_percent: float


def measure(instances: int) -> Row:
    """Measure one size."""
    with tempfile.TemporaryDirectory(prefix="staleflow-bench-") as folder:
        table = Table(Path(folder) / "run", config_for(instances, "process"), rows=1_000_000)
        for number in range(instances):
            _attach(table, f"rollout-{number}", shape(instances)[1])
        table.after(2_000)

        def ask() -> SchedulerStatus:
            table.clock.ms += 1_001  # a cached reply is not older than a second
            reply = table.ask("monitor", GetStatus())
            assert isinstance(reply, SchedulerStatus)
            return reply

        answer = ask()
        encoded = encode_reply(1, answer)
        history = History()
        snapshot = Snapshot(phase="running", elapsed_s=1.0, status=answer)

        def look() -> Board:
            history.see(snapshot)
            return board("bench", snapshot, history)

        shown = look()
        console = Console(file=io.StringIO(), width=200, height=60)
        answer_ms, encode_ms = _median_ms(ask), _median_ms(lambda: encode_reply(1, answer))
        return Row(
            instances=instances,
            leased=answer.ledger["leased"],
            answer_ms=answer_ms,
            encode_ms=encode_ms,
            nbytes=len(encoded),
            decode_ms=_median_ms(lambda: decode_reply(encoded)),
            board_ms=_median_ms(look),
            draw_ms=_median_ms(lambda: console.print(dashboard(shown, Look(), 200, 60))),
            scheduler_percent=(answer_ms + encode_ms) / 10,
        )


def _attach(table: Table, name: str, capacity: int) -> None:
    table.attach(name, "rollout", capacity=capacity)
    stats = InstanceStats(version=Version(0), running=capacity, slots=capacity, tokens_per_s=1000.0)
    table.call(name, Report(worker=WorkerId(name), ack=0, held=[], stats=stats), lambda _: None)


def _median_ms(act: Callable[[], object]) -> float:
    took: list[float] = []
    for _ in range(REPEATS):
        began = time.process_time()
        act()
        took.append(1000 * (time.process_time() - began))
    return sorted(took)[len(took) // 2]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [measure(instances) for instances in tracked("instances", arguments.instances)]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    grid = Grid(
        "instances", "leased groups", "answer ms", "encode ms", "KB", "decode ms", "board ms", "draw ms", "scheduler"
    )
    for row in rows:
        times = (f"{value:.2f}" for value in (row.answer_ms, row.encode_ms))
        viewer = (f"{value:.2f}" for value in (row.decode_ms, row.board_ms, row.draw_ms))
        share = f"{row.scheduler_percent:.2f} %"
        grid.add_row(f"{row.instances:,}", f"{row.leased:,}", *times, f"{row.nbytes / 1000:.0f}", *viewer, share)
    Console().print(grid)


if __name__ == "__main__":
    main()
