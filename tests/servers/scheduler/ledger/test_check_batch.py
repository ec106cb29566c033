"""Before rank 0 trains a prefetched batch, it checks that the batch was not taken back."""

from pathlib import Path

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, GroupId, Step, TrainerTerm
from staleflow.protocols.wire.messages import CheckBatch, Done, Refusal, RegisterQuarantine
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config


def check(table: Table, batch: int, *, term: TrainerTerm) -> Code | None:
    """Return the code of the refusal, or None if the batch is valid."""
    answer = table.ask("trainer", CheckBatch(trainer_term=term, step=Step(0), batch=BatchId(batch)))
    if isinstance(answer, Refusal):
        return answer.code
    assert isinstance(answer, Done), answer
    return None


def test_a_batch_stands_until_a_corrupt_member_takes_it_back_and_the_look_is_no_delivery(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=2, max_staleness=2))
    seat = Seat(table, "a", capacity=6)
    groups = seat.holds()[:2]
    for group in groups:
        seat.finish(group)
    table.wait_for_batch()
    (first,) = table.batches
    term = table.term
    assert check(table, first.batch, term=term) is None
    assert check(table, first.batch + 1, term=term) is Code.CONFLICT
    table.wait_for_batch()
    assert [batch.attempt for batch in table.batches] == [1, 2]
    table.operate(RegisterQuarantine(group=GroupId(groups[0])))
    assert check(table, first.batch, term=term) is Code.CONFLICT
    seat.finish(seat.holds()[0])
    table.wait_for_batch()
    assert table.batches[-1].batch != first.batch
    assert check(table, first.batch, term=term) is Code.CONFLICT
    assert check(table, table.batches[-1].batch, term=term) is None
    table.join("other", 0)
    assert check(table, table.batches[-1].batch, term=term) is Code.FENCED
    table.close()
