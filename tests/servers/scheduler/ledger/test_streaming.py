"""A streaming trainer receives groups of its batch while the batch is still filling."""

from pathlib import Path

import msgspec
import pytest

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Step, Version
from staleflow.protocols.consistency.limits import Bound
from staleflow.protocols.wire.messages import Batch, Claims, GetClaims, Refusal, RegisterQuarantine, Reply
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config


class Asking:
    """The trainer's side of one step: the leases that it holds, and the answers that it got."""

    def __init__(self, table: Table, step: int = 0) -> None:
        self.table, self.step = table, Step(step)
        self.held: list[LeaseId] = []
        self.answers: list[Reply] = []

    def ask(self, count: int = 1) -> None:
        body = GetClaims(trainer_term=self.table.term, step=self.step, held=self.held, count=count, wait_ms=60_000)
        self.table.call("trainer", body, self.answers.append)

    def took(self) -> list[int]:
        """Return the groups of the next answer, which must exist and be claims; their leases are held from then on."""
        answer = self.answers.pop(0)
        assert isinstance(answer, Claims), answer
        self.held += [member.lease for member in answer.members]
        return [int(member.group) for member in answer.members]

    def sealed(self) -> list[int]:
        """Return the groups of the next answer, which must be a batch."""
        answer = self.answers.pop(0)
        assert isinstance(answer, Batch), answer
        return [int(member.group) for member in answer.members]

    def refused(self) -> Code:
        answer = self.answers.pop(0)
        assert isinstance(answer, Refusal), answer
        return answer.code


def test_groups_are_handed_out_as_they_come_and_the_last_with_the_sealed_batch(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=3))
    seat, trainer = Seat(table, "a"), Asking(table)
    first, second, third = seat.holds()[:3]
    trainer.ask()
    assert trainer.answers == []
    seat.finish(second)
    assert trainer.took() == [second]
    seat.finish(first)
    trainer.ask()
    assert trainer.took() == [first], "the order of the batch is that of the claims"
    trainer.ask()
    seat.finish(third)
    assert trainer.sealed() == [second, first, third]
    table.train()
    assert table.close().events["claim"] == 2


def test_as_many_come_at_once_as_were_asked_for(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=4))
    seat, trainer = Seat(table, "a"), Asking(table)
    groups = seat.holds()[:4]
    trainer.ask(count=2)
    seat.finish(groups[0])
    assert trainer.answers == []
    seat.finish(groups[1])
    assert trainer.took() == groups[:2]
    assert "step 0 waits for groups: 2 of 4 are ready (2 with the trainer), " in table.why
    trainer.ask(count=3)
    seat.finish(groups[2])
    seat.finish(groups[3])
    assert trainer.sealed() == groups, "the batch is whole: what is left comes with it"
    table.close()


@pytest.mark.parametrize("restarted", [False, True])
def test_whoever_asks_again_gets_the_same_groups_in_the_same_order(tmp_path: Path, restarted: bool) -> None:
    table = Table(tmp_path / "run", config(batch_size=3))
    seat, dead = Seat(table, "a"), Asking(table)
    groups = seat.holds()[:3]
    for group in (groups[1], groups[0]):
        seat.finish(group)
        dead.ask()
        assert dead.took() == [group]
    if restarted:
        table.restart()
    table.attach("successor", "trainer")
    table.join("successor", 0)
    trainer = Asking(table)
    trainer.ask(count=2)
    assert trainer.took() == [groups[1], groups[0]]
    table.close()


def test_a_corrupt_group_that_was_handed_out_begins_the_step_again(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=3))
    seat, trainer = Seat(table, "a"), Asking(table)
    groups = seat.holds()[:2]
    for group in groups:
        seat.finish(group)
    trainer.ask(count=2)
    assert trainer.took() == groups
    trainer.ask()
    table.operate(RegisterQuarantine(group=GroupId(groups[0])))
    assert trainer.refused() is Code.CONFLICT
    trainer.held = []
    trainer.ask()
    assert trainer.took() == [groups[1]]
    table.close()


def test_after_a_rollback_what_is_held_is_worth_nothing(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=2, max_staleness=2))
    seat, trainer = Seat(table, "a", capacity=6), Asking(table, step=1)
    for group in seat.holds()[:2]:
        seat.finish(group)
    table.train()
    group = seat.holds()[0]
    seat.finish(group)
    trainer.ask()
    assert trainer.took() == [group]
    table.roll_back(0)
    trainer.ask()
    assert trainer.refused() is Code.CONFLICT
    trainer.held = []
    trainer.ask()
    assert trainer.took() == [group], "version 0 wrote it: it is next again, behind the batch that was sealed again"
    table.close()


def test_the_next_step_is_claimed_while_the_trainer_works_but_not_the_one_after(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=2, max_staleness=2))
    seat = Seat(table, "a", capacity=6)
    groups = seat.holds()
    for group in groups[:3]:
        seat.finish(group)
    ahead, far = Asking(table, step=1), Asking(table, step=2)
    ahead.ask()
    assert ahead.took() == [groups[2]]
    seat.finish(groups[3])
    far.ask()
    seat.finish(groups[4])
    assert far.answers == []
    table.train()
    table.flush()
    assert far.took() == [groups[4]]
    table.close()


def test_an_older_term_is_turned_away_and_so_is_a_step_long_gone(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=1))
    seat, trainer = Seat(table, "a"), Asking(table)
    seat.finish(seat.holds()[0])
    table.train()
    trainer.ask()
    assert trainer.refused() is Code.STALE
    waiting = Asking(table, step=1)
    waiting.ask()
    table.attach("successor", "trainer")
    table.join("successor", 1)
    table.flush()
    assert waiting.refused() is Code.FENCED
    table.close()


def test_the_token_bound_says_what_is_masked(tmp_path: Path) -> None:
    settings = config(batch_size=2, max_staleness=0)
    token = msgspec.structs.replace(settings.staleness, bound=Bound.TOKEN)
    table = Table(tmp_path / "run", msgspec.structs.replace(settings, staleness=token))
    seat = Seat(table, "a")
    for _ in range(2):
        for group in seat.holds()[:2]:
            seat.finish(group)
        table.train()
        seat.report()
    trainer = Asking(table, step=2)
    seat.finish(seat.holds()[0])
    trainer.ask()
    (answer,) = trainer.answers
    assert isinstance(answer, Claims)
    assert (answer.lineage, answer.step, answer.mask_below) == (Lineage(0), Step(2), Version(2))
    table.close()
