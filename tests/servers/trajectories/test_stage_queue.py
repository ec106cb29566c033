"""The queue of one stage, without sockets and clocks."""

from typing import ClassVar

from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.servers.trajectories.records import Key
from staleflow.servers.trajectories.stage_queue import MAX_TRIES, StageQueue

A, B = Key(GroupId(1), LeaseId(1)), Key(GroupId(2), LeaseId(2))


def queue_of(*keys: Key) -> StageQueue:
    queue = StageQueue(first_ticket=7)
    for key in keys:
        queue.add(key)
    return queue


def test_groups_leave_in_the_order_in_which_they_came() -> None:
    queue = queue_of(A, B)
    assert [t.key for t in queue.take("w", 5, now_s=0, seconds_each=1)] == [A, B]
    assert (len(queue), queue.taken) == (0, 2)


def test_only_the_newest_ticket_finishes_a_group() -> None:
    queue = queue_of(A)
    (old,) = queue.take("w", 1, now_s=0, seconds_each=1)
    assert queue.lose("w") == []
    (new,) = queue.take("x", 1, now_s=0, seconds_each=1)
    assert not queue.finish(A, old.number, "w")
    assert queue.finish(A, new.number, "x")
    assert not queue.finish(A, new.number, "x")


def test_only_the_worker_that_has_a_ticket_finishes_its_group() -> None:
    queue = queue_of(A)
    (ticket,) = queue.take("w", 1, now_s=0, seconds_each=1)
    assert not queue.finish(A, ticket.number, "x")
    assert queue.finish(A, ticket.number, "w")


def test_a_ticket_expires_after_the_time_of_all_that_was_taken_with_it() -> None:
    queue = queue_of(A, B)
    queue.take("w", 2, now_s=10, seconds_each=3)
    assert queue.expire(15.9) == []
    assert queue.taken == 2
    queue.expire(16)
    assert [t.key for t in queue.take("x", 2, now_s=16, seconds_each=3)] == [A, B]


def test_a_ticket_lasts_for_what_its_worker_has_already() -> None:
    queue = queue_of(A, B)
    (first,) = queue.take("w", 1, now_s=10, seconds_each=3)
    (second,) = queue.take("w", 1, now_s=10, seconds_each=3)
    assert (first.until_s, second.until_s) == (13, 16)
    queue.give_back([first, second])
    assert [t.until_s for t in queue.take("w", 1, now_s=10, seconds_each=3)] == [13]  # what it gave back is not counted
    assert [t.until_s for t in queue.take("x", 1, now_s=10, seconds_each=3)] == [13]  # nor what another one has


def test_a_group_that_is_lost_too_often_leaves_the_queue() -> None:
    queue = queue_of(A, B)
    for _ in range(MAX_TRIES - 1):
        queue.take("w", 1, now_s=0, seconds_each=1)
        assert queue.lose("w") == []
    queue.take("w", 1, now_s=0, seconds_each=1)
    assert queue.lose("w") == [A]
    assert [t.key for t in queue.take("x", 5, now_s=0, seconds_each=1)] == [B]


def test_a_group_that_was_given_back_counts_as_never_taken() -> None:
    queue = queue_of(A, B)
    for _ in range(MAX_TRIES + 1):
        queue.give_back(queue.take("w", 2, now_s=0, seconds_each=1))
    assert [t.key for t in queue.take("w", 2, now_s=0, seconds_each=1)] == [A, B]


def test_a_forgotten_group_is_neither_handed_out_nor_finished() -> None:
    queue = queue_of(A, B)
    (ticket,) = queue.take("w", 1, now_s=0, seconds_each=1)
    queue.forget(A)
    queue.forget(B)
    assert not queue.finish(A, ticket.number, "w")
    assert queue.take("w", 1, now_s=0, seconds_each=1) == []


class Counting(Key):
    """Counts how often a key is compared with another."""

    compared: ClassVar[int] = 0
    __hash__ = Key.__hash__

    def __eq__(self, other: object) -> bool:
        Counting.compared += 1
        return super().__eq__(other)


def test_to_forget_a_group_takes_no_walk_over_those_that_wait() -> None:
    keys = [Counting(GroupId(number), LeaseId(1)) for number in range(1, 1001)]
    queue = queue_of(*keys)
    Counting.compared = 0
    for key in (*keys[::2], *(Counting(GroupId(number), LeaseId(1)) for number in range(2001, 2501))):
        queue.forget(key)
    assert Counting.compared <= 4 * 1_000
    assert [t.key for t in queue.take("w", 1000, now_s=0, seconds_each=1)] == keys[1::2]
