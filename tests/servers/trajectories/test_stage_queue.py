"""The queue of one stage hands out tickets correctly, without sockets and clocks."""

from typing import ClassVar

from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.servers.trajectories.records import Key
from staleflow.servers.trajectories.stage_queue import (
    HOLD_AFTER,
    MAX_HOLD_S,
    MAX_TRIES,
    MAX_WORKERS,
    StageQueue,
    Ticket,
)

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
    assert [t.until_s for t in queue.take("w", 1, now_s=10, seconds_each=3)] == [13]  # returned groups do not count
    # nor do the groups of another worker
    assert [t.until_s for t in queue.take("x", 1, now_s=10, seconds_each=3)] == [13]


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
    """Key that counts its comparisons with other keys."""

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


def fail(queue: StageQueue, ticket: Ticket, *, now_s: float = 0) -> bool | None:
    return queue.fail(ticket.key, ticket.number, ticket.worker, "judge: connection refused", now_s=now_s)


def test_a_group_that_one_worker_failed_goes_to_another_one() -> None:
    queue = queue_of(A, B)
    queue.ask("x")
    (ticket,) = queue.take("w", 1, now_s=0, seconds_each=1)
    assert fail(queue, ticket) is False
    assert fail(queue, ticket) is None  # that ticket has ended
    assert [t.key for t in queue.take("w", 2, now_s=1_000, seconds_each=1)] == [B]
    assert [t.key for t in queue.take("x", 2, now_s=0, seconds_each=1)] == [A]


def test_a_group_is_given_up_when_all_of_several_workers_have_failed_it() -> None:
    queue = queue_of(A)
    queue.ask("x")
    assert fail(queue, queue.take("w", 1, now_s=0, seconds_each=1)[0]) is False
    assert fail(queue, queue.take("x", 1, now_s=0, seconds_each=1)[0]) is True
    assert (len(queue), queue.taken) == (0, 0)


def test_of_many_workers_three_give_a_group_up() -> None:
    queue = queue_of(A)
    for worker in "uvwxyz":
        queue.ask(worker)
    outcomes = [fail(queue, queue.take(worker, 1, now_s=0, seconds_each=1)[0]) for worker in "uvw"]
    assert outcomes == [False, False, True]


def test_the_only_worker_tries_a_group_again_after_growing_pauses() -> None:
    queue = queue_of(A)
    (ticket,) = queue.take("w", 1, now_s=10, seconds_each=1)
    assert fail(queue, ticket, now_s=10) is False
    assert queue.take("w", 1, now_s=10.9, seconds_each=1) == []
    (ticket,) = queue.take("w", 1, now_s=11, seconds_each=1)
    assert fail(queue, ticket, now_s=11) is False
    assert queue.take("w", 1, now_s=12.9, seconds_each=1) == []
    (ticket,) = queue.take("w", 1, now_s=13, seconds_each=1)
    assert fail(queue, ticket, now_s=13) is True


def test_a_worker_that_fails_every_group_is_held_with_a_back_off_that_a_success_resets() -> None:
    keys = [Key(GroupId(number), LeaseId(1)) for number in range(100)]
    queue, now_s = queue_of(*keys), 0.0
    queue.ask("healthy")
    for ticket in queue.take("w", 8, now_s=now_s, seconds_each=99):  # simultaneous failures cause one hold
        fail(queue, ticket, now_s=now_s)
    waits: list[float] = []
    (failing,) = queue.failing()
    for _ in range(8):
        (failing,) = queue.failing()
        assert failing.worker == "w"
        assert queue.take("w", 8, now_s=failing.held_until_s - 0.01, seconds_each=99) == []
        waits.append(failing.held_until_s - now_s)
        now_s = failing.held_until_s
        (probe,) = queue.take("w", 8, now_s=now_s, seconds_each=99)
        assert queue.take("w", 8, now_s=now_s, seconds_each=99) == []  # one probe at a time
        fail(queue, probe, now_s=now_s)
    assert waits == [1, 2, 4, 8, 16, 32, MAX_HOLD_S, MAX_HOLD_S]
    assert (failing.failures, failing.since_s, failing.why) == (15, 0.0, "judge: connection refused")
    now_s += MAX_HOLD_S
    (probe,) = queue.take("w", 8, now_s=now_s, seconds_each=99)
    assert queue.finish(probe.key, probe.number, "w")
    assert queue.failing() == []
    assert len(queue.take("w", 8, now_s=now_s, seconds_each=99)) == 8


def test_a_worker_that_fails_some_groups_is_never_held() -> None:
    queue = queue_of(*(Key(GroupId(number), LeaseId(1)) for number in range(90)))
    queue.ask("x")
    for number in range(60):
        (ticket,) = queue.take("w", 1, now_s=0, seconds_each=1)
        if number % HOLD_AFTER:
            fail(queue, ticket)
        else:
            queue.finish(ticket.key, ticket.number, "w")
    assert queue.failing() == []


def test_a_group_waits_for_no_other_worker_that_is_held() -> None:
    last = Key(GroupId(99), LeaseId(1))
    queue = queue_of(*(Key(GroupId(number), LeaseId(1)) for number in range(HOLD_AFTER)), last)
    for ticket in queue.take("broken", HOLD_AFTER, now_s=0, seconds_each=9):
        fail(queue, ticket)
    assert len(queue.failing()) == 1
    tickets = queue.take("w", 99, now_s=0, seconds_each=9)
    mine = next(ticket for ticket in tickets if ticket.key == last)
    assert fail(queue, mine) is False
    assert [t.key for t in queue.take("w", 1, now_s=1, seconds_each=9)] == [last]


def test_a_worker_whose_tickets_expire_is_held_too() -> None:
    queue = queue_of(*(Key(GroupId(number), LeaseId(1)) for number in range(9)))
    queue.ask("x")
    queue.take("w", HOLD_AFTER, now_s=0, seconds_each=1)
    queue.expire(HOLD_AFTER)
    assert [failing.why for failing in queue.failing()] == ["the time limit was exceeded"]
    assert queue.take("w", 9, now_s=HOLD_AFTER, seconds_each=1) == []
    assert len(queue.take("x", 9, now_s=HOLD_AFTER, seconds_each=1)) == 9


def test_a_ticket_of_a_worker_that_makes_groups_side_by_side_lasts_for_its_rounds() -> None:
    queue = queue_of(*(Key(GroupId(number), LeaseId(1)) for number in range(9)))
    assert {t.until_s for t in queue.take("w", 8, now_s=10, seconds_each=3, at_once=4)} == {16}
    assert {t.until_s for t in queue.take("w", 1, now_s=10, seconds_each=3, at_once=4)} == {19}


def test_workers_beyond_the_limit_are_forgotten_unless_they_have_groups() -> None:
    queue = queue_of(A)
    (ticket,) = queue.take("w", 1, now_s=0, seconds_each=1)
    for number in range(2 * MAX_WORKERS):
        queue.ask(f"x-{number}", 1)
    assert queue.calls == MAX_WORKERS - 1
    assert queue.finish(A, ticket.number, "w")


def test_a_group_that_a_held_worker_has_failed_is_tried_again_although_new_groups_never_cease() -> None:
    keys = [Key(GroupId(number), LeaseId(1)) for number in range(HOLD_AFTER)]
    queue, now_s = queue_of(*keys), MAX_HOLD_S
    for ticket in queue.take("w", HOLD_AFTER, now_s=0, seconds_each=99):
        fail(queue, ticket, now_s=0)
    given_up = set[Key]()
    for number in range(100, 100 + 4 * HOLD_AFTER * MAX_TRIES):
        queue.add(Key(GroupId(number), LeaseId(1)))  # a failing group returns as another one, under a new lease
        (probe,) = queue.take("w", 1, now_s=now_s, seconds_each=99)
        if fail(queue, probe, now_s=now_s):
            given_up.add(probe.key)
        now_s += MAX_HOLD_S
    assert given_up >= set(keys)
