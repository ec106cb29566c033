"""A trainer that waits for a batch while it publishes the version before gets the rest of that batch started."""

from pathlib import Path

from staleflow.protocols.consistency.ids import Step
from staleflow.protocols.coordination.admission import Pace
from staleflow.protocols.wire.messages import GetBatch, Reply
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config


def request(table: Table, replies: list[Reply], *, waiting: bool) -> None:
    """Request the batch after the current one, and let the scheduler decide what to start."""
    ask = GetBatch(trainer_term=table.term, step=Step(1), wait_ms=60_000, waiting=waiting)
    table.call("trainer", ask, replies.append)
    table.after(200)


def test_prefetching_starts_no_group_and_waiting_starts_all_that_the_batch_lacks(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=4, max_staleness=1))
    pacing = table.service._cycle._pacing  # pyright: ignore[reportPrivateUsage]
    pacing.pace = Pace(lead=0.5)  # of a trainer that is slow: half of the next batch gathers while it trains
    seat = Seat(table, "a", capacity=20)
    seat.report(slots=0)
    for group in seat.holds():
        seat.finish(group)
    table.wait_for_batch()
    seat.report()
    assert ([batch.step for batch in table.batches], len(seat.holds())) == ([0], 2)
    replies: list[Reply] = []
    request(table, replies, waiting=False)
    seat.report()
    assert len(seat.holds()) == 2
    request(table, replies, waiting=True)
    seat.report()
    assert len(seat.holds()) == 4
    assert replies == []
    table.close()
