"""Groups that the trainer cannot train leave their batch as corrupt ones do; too many of them end the run."""

from collections.abc import Sequence
from pathlib import Path

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, Step, TrainerTerm
from staleflow.protocols.wire.messages import Batch, Done, GetClaims, QuarantineGroups, Refusal
from staleflow.servers.scheduler.ledger.training import MIN_UNTRAINABLE
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config


def opened(folder: Path, batch_size: int = 2) -> tuple[Table, Seat]:
    table = Table(folder / "run", config(batch_size=batch_size, max_staleness=2))
    return table, Seat(table, "a", capacity=6)


def sealed(table: Table, seat: Seat) -> Batch:
    """Return the next batch; its groups are finished as they are needed."""
    known = len(table.batches)
    table.wait_for_batch()
    while len(table.batches) == known:
        seat.report()
        seat.finish(seat.holds()[0])
    return table.batches[-1]


def members(batch: Batch) -> list[int]:
    return [member.group for member in batch.members]


def quarantine(table: Table, groups: Sequence[int], term: TrainerTerm | None = None) -> Refusal | None:
    ask = QuarantineGroups(trainer_term=term or table.term, groups=[GroupId(g) for g in groups], why="it raises")
    answer = table.ask("trainer", ask)
    assert isinstance(answer, Done | Refusal)
    return answer if isinstance(answer, Refusal) else None


def test_the_batch_is_sealed_again_without_them_and_the_run_goes_on(tmp_path: Path) -> None:
    table, seat = opened(tmp_path)
    first = sealed(table, seat)
    bad, good = members(first)
    assert quarantine(table, [bad]) is None
    second = sealed(table, seat)
    assert second.batch != first.batch
    assert good in members(second)
    assert bad not in members(second)
    table.train()
    assert quarantine(table, [bad, good, 10**6]) is None  # consumed, dropped or unknown: ignored
    assert bad not in members(sealed(table, seat))
    table.close()


def test_another_trainer_or_an_older_one_quarantines_nothing(tmp_path: Path) -> None:
    table, seat = opened(tmp_path)
    first = sealed(table, seat)
    older = table.term
    table.join("other", 0)
    refused = quarantine(table, members(first), older)
    assert refused is not None
    assert refused.code is Code.FENCED
    assert members(sealed(table, seat)) == members(first)
    table.close()


def test_a_model_that_no_group_can_be_trained_with_ends_the_run_and_not_the_data(tmp_path: Path) -> None:
    table, seat = opened(tmp_path)
    for _ in range(MIN_UNTRAINABLE):
        assert quarantine(table, members(sealed(table, seat))[:1]) is None
    last = sealed(table, seat)
    refused = quarantine(table, members(last)[:1])
    assert refused is not None
    assert refused.code is Code.DENIED
    assert "groups in a row cannot be trained, more than 8" in refused.detail
    assert refused.detail.endswith("Last: it raises")
    assert members(sealed(table, seat)) == members(last)  # no other group was dropped
    table.close()


def test_a_step_that_is_trained_begins_the_count_again(tmp_path: Path) -> None:
    table, seat = opened(tmp_path)
    for number in range(2 * MIN_UNTRAINABLE):
        assert quarantine(table, members(sealed(table, seat))[:1]) is None
        if number == MIN_UNTRAINABLE - 1:
            sealed(table, seat)
            table.train()
    table.close()


def test_a_claimed_group_leaves_too(tmp_path: Path) -> None:
    """The group belongs to a batch that is not sealed yet, of a streaming trainer."""
    table, seat = opened(tmp_path)
    seat.finish(group := seat.holds()[0])
    table.ask("trainer", GetClaims(trainer_term=table.term, step=Step(0), held=[], count=1))
    assert quarantine(table, [group]) is None
    assert table.interpreter.machine.group(GroupId(group)) is None
    table.close()
