"""The prompt queue deals each row once per epoch, in a seeded order that survives restarts."""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from staleflow.protocols.consistency.ids import GroupId
from staleflow.servers.scheduler.lengths.expected import Lengths
from staleflow.servers.scheduler.prompts.queue import TABLES, PromptQueue
from staleflow.servers.scheduler.prompts.stream import Clustering, permuted
from staleflow.store.lmdb import Store
from staleflow.store.memory import MemoryStore


def deck(rows: int = 5, *, seed: int = 0, epochs: int = 0) -> PromptQueue:
    made = PromptQueue(seed=seed, epochs=epochs)
    assert made.set_source(rows, "sha")
    return made


def deal(made: PromptQueue, count: int) -> list[GroupId | None]:
    return [made.pop() for _ in range(count)]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 1000, 4097])
def test_an_epoch_deals_every_row_once(rows: int) -> None:
    made = deck(rows)
    for epoch in range(3):
        assert sorted(group for group in deal(made, rows) if group is not None) == [
            epoch * rows + row for row in range(rows)
        ]


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    first = deal(deck(50), 100)
    assert first == deal(deck(50), 100)
    assert first[:50] != [group - 50 for group in first[50:] if group is not None]
    assert first != deal(deck(50, seed=1), 100)


def test_the_permutation_does_not_depend_on_where_it_is_cut() -> None:
    whole = permuted(0, 3000, 3000, seed=1, epoch=2)
    assert permuted(1024, 500, 3000, seed=1, epoch=2) == whole[1024:1524]


def test_what_is_dealt_again_comes_first() -> None:
    made = deck()
    first = made.pop()
    assert first is not None
    made.pop()
    made.requeue(first)
    assert made.num_requeued == 1
    assert made.pop() == first
    assert made.num_requeued == 0


def test_what_was_overdue_lets_others_go_first() -> None:
    made = deck(10)
    first = made.pop()
    assert first is not None
    made.requeue(first, after=2)
    assert first not in deal(made, 2)
    assert made.pop() == first


def test_after_the_last_epoch_only_what_is_dealt_again_is_left() -> None:
    made = deck(3, epochs=2)
    dealt = deal(made, 6)
    assert made.num_left() == 0
    assert made.pop() is None
    assert dealt[4] is not None
    made.requeue(dealt[4], after=100)
    assert made.num_left() == 1
    assert deal(made, 2) == [dealt[4], None]


def test_a_group_leased_by_somebody_else_is_not_dealt() -> None:
    made = deck()
    first, second = deal(made, 2)
    assert first is not None
    assert second is not None
    made.requeue(first)
    made.requeue(second)
    made.discard(first)
    made.discard(first)
    assert made.pop() == second
    assert made.pop() not in (first, second)


def test_another_prompt_source_is_refused() -> None:
    made = deck(5)
    assert made.set_source(5, "sha")
    assert not made.set_source(6, "sha")
    assert not made.set_source(5, "other")


def test_without_rows_nothing_is_dealt() -> None:
    assert PromptQueue(seed=0, epochs=0).pop() is None


def test_a_deck_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    store = Store(tmp_path, tables=TABLES, map_bytes=1 << 20, durability="process")
    made = deck(20)
    dealt = deal(made, 7)
    assert dealt[2] is not None
    assert dealt[3] is not None
    made.requeue(dealt[2])
    made.requeue(dealt[3])
    made.discard(dealt[2])
    with store.write() as txn:
        made.save(txn)
    made.saved()
    assert not made.changed
    lost = made.pop()  # never saved
    again = PromptQueue(seed=0, epochs=0)
    with store.read() as txn:
        again.load(txn)
    assert again.rows == 20
    assert lost == dealt[3]
    rest = deal(again, 14)
    assert rest[0] == dealt[3]
    assert sorted(group for group in {*dealt, *rest} if group is not None) == list(range(20))
    store.close()


# Upcoming prompts -----------------------------------------------------------------------------------------------------


def save(made: PromptQueue, store: MemoryStore) -> None:
    with store.write() as txn:
        made.save(txn)
    made.saved()


def restarted(made: PromptQueue, store: MemoryStore) -> PromptQueue:
    with store.read() as txn:
        made.load(txn)
    return made


def test_what_is_upcoming_is_what_is_dealt_next() -> None:
    made = deck(10)
    first, second = deal(made, 2)
    assert first is not None
    assert second is not None
    made.requeue(first)
    made.requeue(second, after=3)
    upcoming = made.upcoming(8)
    assert upcoming[0] == first
    assert upcoming[4] == second
    assert made.upcoming(8) == upcoming
    assert deal(made, 8) == upcoming


def test_upcoming_ends_with_the_source_and_then_names_what_is_not_due_yet() -> None:
    made = deck(3, epochs=1)
    assert sorted(made.upcoming(100)) == [0, 1, 2]
    last = made.upcoming(3)[2]
    made.pop_group(last)
    made.requeue(last, after=50)
    assert made.upcoming(100)[2] == last
    assert len(made.upcoming(100)) == 3


def test_any_of_the_upcoming_groups_can_be_dealt_and_the_others_keep_their_order() -> None:
    made = deck(10)
    a, b, c, d = made.upcoming(4)
    made.pop_group(c)
    assert made.upcoming(3) == [a, b, d]
    with pytest.raises(KeyError):
        made.pop_group(c)
    assert deal(made, 3) == [a, b, d]


def test_groups_dealt_out_of_turn_are_not_dealt_again_after_a_restart() -> None:
    store = MemoryStore(TABLES)
    made = deck(30)
    whole = deal(deck(30), 60)
    out_of_turn = [whole[9], whole[2], whole[0], whole[5]]
    made.upcoming(10)
    for group in out_of_turn:
        assert group is not None
        made.pop_group(group)
    save(made, store)
    again = restarted(PromptQueue(seed=0, epochs=0), store)
    assert deal(again, 56) == [group for group in whole if group not in out_of_turn]


def test_a_deck_saved_before_groups_could_be_dealt_out_of_turn_goes_on() -> None:
    store = MemoryStore(TABLES)
    with store.write() as txn:
        txn.put("deck", b"state", msgspec.msgpack.encode({"rows": 20, "prompts_sha": "sha", "cursor": 7}))
    again = restarted(PromptQueue(seed=0, epochs=0), store)
    assert deal(again, 13) == deal(deck(20), 20)[7:]


# In order of expected length ------------------------------------------------------------------------------------------


class Told(Lengths):
    """Lengths that predict the given length for each row."""

    def __init__(self, told: dict[int, float]) -> None:
        super().__init__()
        self.told = told

    def expected_of(self, groups: Sequence[GroupId]) -> list[float]:
        return [self.told.get(group % self.rows, 0.0) for group in groups]


def clustered(
    rows: int, told: dict[int, float], *, batch_size: int = 2, lookahead: int = 3, epochs: int = 0
) -> PromptQueue:
    clustering = Clustering(batch_size=batch_size, lookahead=lookahead)
    made = PromptQueue(seed=0, epochs=epochs, lengths=Told(told), clustering=clustering)
    assert made.set_source(rows, "sha")
    return made


def test_each_block_of_a_clustered_deck_holds_the_prompts_of_the_stream_and_turns_the_order_round() -> None:
    told = {row: float(1 + row) for row in range(60)}
    stream = deal(deck(60), 18)
    dealt = deal(clustered(60, told), 18)
    assert dealt[:6] == sorted(stream[:6], key=number)
    assert dealt[6:12] == sorted(stream[6:12], key=number, reverse=True)
    assert dealt[12:] == sorted(stream[12:], key=number)


def number(group: GroupId | None) -> int:
    assert group is not None
    return group


def test_a_clustered_deck_that_knows_no_length_deals_the_prompts_as_they_come() -> None:
    assert deal(clustered(60, {}), 90) == deal(deck(60), 90)


def test_what_is_learned_while_a_block_is_dealt_orders_the_rest_of_it_after_the_next_batch() -> None:
    told: dict[int, float] = {}
    made = clustered(60, told, lookahead=6)
    stream = deal(deck(60), 12)
    assert deal(made, 3) == stream[:3]
    told.update({row: float(100 - row) for row in range(60)})
    assert made.pop() == stream[3]
    assert deal(made, 8) == sorted(stream[4:], key=number, reverse=True)


def test_a_clustered_deck_ends_with_its_last_epoch() -> None:
    made = clustered(10, {row: 1.0 + row for row in range(10)}, epochs=2)
    dealt = deal(made, 21)
    assert dealt[20] is None
    assert sorted(group for group in dealt if group is not None) == list(range(20))
    assert made.num_left() == 0


@pytest.mark.parametrize("seed", range(20))
def test_random_restarts_neither_lose_nor_repeat_a_prompt_and_nobody_waits_for_more_than_two_blocks(seed: int) -> None:
    choose = random.Random(seed)
    rows, block = choose.randint(7, 60), 6
    told = {row: choose.choice([0.0, choose.lognormvariate(5, 1)]) for row in range(rows)}
    store = MemoryStore(TABLES)
    made = clustered(rows, told)
    save(made, store)
    kept: list[GroupId] = []
    dealt: list[GroupId] = []
    for _ in range(120):
        match choose.choice(["deal", "deal", "any", "save", "crash", "learn"]):
            case "deal":
                dealt += [group for group in deal(made, choose.randint(1, 5)) if group is not None]
            case "any":
                group = choose.choice(made.upcoming(block))
                made.pop_group(group)
                dealt.append(group)
            case "save":
                save(made, store)
                kept = list(dealt)
            case "crash":  # unsaved changes are lost
                clustering = choose.choice([Clustering(batch_size=2, lookahead=3), None])
                made = restarted(PromptQueue(seed=0, epochs=0, lengths=Told(told), clustering=clustering), store)
                dealt = list(kept)
            case "learn":
                told[choose.randrange(rows)] = choose.lognormvariate(5, 1)
            case other:
                raise AssertionError(other)
    assert len(set(dealt)) == len(dealt)
    stream = deal(deck(rows), len(dealt) + 2 * block)
    assert set(dealt) <= set(stream)
    started = {place // block for place, group in enumerate(stream) if group in set(dealt)}
    finished = [group for group in stream[: (max(started, default=0) - 1) * block] if group not in set(dealt)]
    assert finished == []
