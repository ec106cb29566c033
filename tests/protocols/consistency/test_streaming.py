"""Claims of a streaming trainer fix members of a batch before the batch is sealed."""

from staleflow.protocols.consistency.effects import Claimed, Code
from staleflow.protocols.consistency.events import Claim
from staleflow.protocols.consistency.ids import GroupId, Step, TrainerTerm, Version
from tests.protocols.consistency.scenes import Scene, code, seals


def test_a_claim_fixes_the_first_in_order_and_the_seal_contains_it() -> None:
    scene = Scene(max_staleness=1, batch_size=2)
    scene.reserve(0, 1, 2)
    scene.finish(2)
    assert scene.machine.claimable() == 2
    assert scene.claim(2, step=0) == (Claimed(group=GroupId(2), step=Step(0)),)
    assert scene.view(2).claimed
    assert seals(scene.finish(0)) == [(0, (2, 0))]


def test_claimed_groups_come_first_in_the_order_of_their_claims_also_after_a_restart() -> None:
    scene = Scene(max_staleness=1, batch_size=3)
    scene.reserve(0, 1, 2)
    scene.finish(1, 0)
    scene.claim(1, step=0)
    scene.claim(0, step=0)
    scene.machine = scene.restart()
    assert seals(scene.finish(2)) == [(0, (1, 0, 2))]


def test_only_the_first_in_order_may_be_claimed() -> None:
    scene = Scene(max_staleness=1, batch_size=3)
    scene.reserve(0, 1, 2)
    scene.finish(1, 0)
    assert code(scene.claim(0, step=0)) is Code.DENIED
    assert code(scene.claim(2, step=0)) is Code.DENIED, "it is not occupied"
    assert code(scene.claim(9, step=0)) is Code.STALE


def test_a_claim_is_denied_while_it_would_leave_too_many_for_an_earlier_deadline() -> None:
    scene = Scene(max_staleness=1, batch_size=2)
    scene.reserve(0, 1, 2, 3)
    scene.finish(0, 1)
    scene.train(0)
    scene.reserve(10, version=1)
    scene.finish(10)
    assert scene.machine.window() == ((1, 2, 0, 0), (2, 0, 0, 1))
    assert scene.machine.claimable() is None
    assert code(scene.claim(10, step=1)) is Code.DENIED


def test_a_claimed_seat_is_not_admitted_again() -> None:
    scene = Scene(max_staleness=0, batch_size=2)
    scene.reserve(0, 1)
    scene.finish(0)
    scene.claim(0, step=0)
    assert scene.machine.room(Version(0)) == 0


def test_the_same_claim_again_is_a_duplicate_before_and_after_the_seal() -> None:
    scene = Scene(max_staleness=1, batch_size=2)
    scene.reserve(0, 1)
    scene.finish(0)
    scene.claim(0, step=0)
    assert code(scene.claim(0, step=0)) is Code.DUPLICATE
    scene.finish(1)
    assert code(scene.claim(0, step=0)) is Code.DUPLICATE
    assert code(scene.claim(0, step=1)) is Code.STALE


def test_a_claim_for_another_step_or_by_another_term_is_refused() -> None:
    scene = Scene(max_staleness=1, batch_size=2)
    scene.reserve(0)
    scene.finish(0)
    assert code(scene.claim(0, step=1)) is Code.STALE
    assert code(scene.apply(Claim(group=GroupId(0), step=Step(0), trainer_term=TrainerTerm(7)))) is Code.FENCED


def test_a_claimed_group_cannot_be_dropped() -> None:
    scene = Scene(max_staleness=1, batch_size=2)
    scene.reserve(0)
    scene.finish(0)
    scene.claim(0, step=0)
    assert code(scene.drop(0)) is Code.DENIED


def test_a_rollback_unclaims() -> None:
    scene = Scene(max_staleness=2, batch_size=2)
    scene.reserve(0, 1, 2)
    scene.finish(0, 1)
    scene.train(0)
    scene.finish(2)
    scene.claim(2, step=1)
    scene.join(0, trainer="again")
    assert not scene.view(2).claimed
    assert scene.machine.state_counts()["claimed"] == 0


def test_a_quarantine_of_a_claimed_group_unclaims() -> None:
    scene = Scene(max_staleness=2, batch_size=3)
    scene.reserve(0, 1)
    scene.finish(0, 1)
    scene.claim(0, step=0)
    scene.claim(1, step=0)
    scene.quarantine(0)
    assert not scene.view(1).claimed
    assert scene.machine.retired(GroupId(0))
