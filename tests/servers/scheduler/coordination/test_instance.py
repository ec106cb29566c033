"""Commands are numbered until they are acknowledged, and a pull without a result is ordered again after a while."""

from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import Abort, InstanceStats
from staleflow.servers.scheduler.coordination.instance import PULL_RETRY_MS, PULL_TIMEOUT_MS, CommandQueue, Instance

LOADED = InstanceStats(version=Version(1))


def abort(lease: int) -> Abort:
    return Abort(lease=LeaseId(lease))


def queue(*leases: int) -> CommandQueue:
    made = CommandQueue()
    for lease in leases:
        made.add(abort(lease))
    return made


def test_numbers_count_on_and_what_is_acknowledged_goes() -> None:
    commands = CommandQueue()
    assert [commands.add(abort(lease)) for lease in (1, 2, 3)] == [1, 2, 3]
    assert commands.take() == commands.take() == [abort(1), abort(2), abort(3)]
    commands.acknowledge(2)
    assert (commands.acked, commands.pending) == (2, [abort(3)])
    commands.acknowledge(1)
    assert (commands.acked, commands.pending) == (2, [abort(3)])
    assert commands.add(abort(4)) == 4


def test_a_number_of_an_earlier_incarnation_moves_the_count_and_loses_nothing() -> None:
    commands = queue(1)
    commands.acknowledge(57)
    assert (commands.acked, commands.take()) == (57, [abort(1)])
    commands.acknowledge(58)
    assert commands.pending == []


def test_what_was_not_sent_can_be_forgotten() -> None:
    commands = queue(1)
    commands.take()
    commands.add(abort(2))
    commands.discard_unsent()
    assert commands.pending == [abort(1)]
    assert commands.add(abort(3)) == 2


def test_a_pull_is_over_when_the_weights_are_reported() -> None:
    instance = Instance(WorkerId("w"), 1)
    instance.order_pull(Lineage(0), Version(1), 100)
    assert instance.pulling(100)
    instance.update_stats(InstanceStats(version=Version(0)))
    assert instance.pulling(101)
    instance.update_stats(LOADED)
    assert not instance.pulling(102)
    assert not instance.stuck


def test_a_pull_that_failed_is_ordered_again_after_a_while_and_meanwhile_work_goes_on() -> None:
    instance = Instance(WorkerId("w"), 1)
    instance.order_pull(Lineage(0), Version(1), 0)
    instance.pull_failed(50)
    assert instance.stuck
    assert instance.pulling(50 + PULL_RETRY_MS - 1)
    assert not instance.pulling(50 + PULL_RETRY_MS)
    instance.order_pull(Lineage(0), Version(1), 50 + PULL_RETRY_MS)
    assert instance.stuck
    instance.update_stats(LOADED)
    assert not instance.stuck


def test_a_pull_without_an_answer_is_ordered_again() -> None:
    instance = Instance(WorkerId("w"), 1)
    instance.order_pull(Lineage(0), Version(1), 0)
    assert instance.pulling(PULL_TIMEOUT_MS - 1)
    assert not instance.pulling(PULL_TIMEOUT_MS)
    assert not instance.stuck
    instance.order_pull(Lineage(0), Version(1), PULL_TIMEOUT_MS)
    assert instance.stuck


def test_weights_are_there_or_on_their_way_by_the_newest_order() -> None:
    instance = Instance(WorkerId("w"), 1)
    instance.update_stats(LOADED)
    assert instance.will_have(Lineage(0), Version(1))
    assert not instance.will_have(Lineage(0), Version(2))
    assert not instance.will_have(Lineage(1), Version(0))
    instance.order_pull(Lineage(1), Version(2), 100)
    assert instance.will_have(Lineage(1), Version(1))
    instance.order_pull(Lineage(0), Version(1), 200)
    assert not instance.will_have(Lineage(1), Version(1))


def test_an_order_to_load_that_was_never_sent_is_given_again_after_a_failed_commit() -> None:
    instance = Instance(WorkerId("w"), 1)
    instance.order_pull(Lineage(0), Version(1), 100)
    instance.reload({})
    assert (instance.pull, instance.pulling(101), instance.commands.pending) == (None, False, [])
    instance.order_pull(Lineage(0), Version(1), 102)
    instance.commands.take()
    instance.reload({})
    assert instance.pulling(103)
