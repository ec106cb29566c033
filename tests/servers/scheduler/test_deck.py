"""The order of prompts."""

from pathlib import Path

import pytest

from staleflow.protocols.consistency.ids import GroupId
from staleflow.runtime.lmdb_store import Store
from staleflow.servers.scheduler.deck import TABLES, Deck, permuted


def deck(rows: int = 5, *, seed: int = 0, epochs: int = 0) -> Deck:
    made = Deck(seed=seed, epochs=epochs)
    assert made.set_source(rows, "sha")
    return made


def deal(made: Deck, count: int) -> list[GroupId | None]:
    return [made.deal() for _ in range(count)]


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
    first = made.deal()
    assert first is not None
    made.deal()
    made.again(first)
    assert made.waiting == 1
    assert made.deal() == first
    assert made.waiting == 0


def test_what_was_overdue_lets_others_go_first() -> None:
    made = deck(10)
    first = made.deal()
    assert first is not None
    made.again(first, after=2)
    assert first not in deal(made, 2)
    assert made.deal() == first


def test_after_the_last_epoch_only_what_is_dealt_again_is_left() -> None:
    made = deck(3, epochs=2)
    dealt = deal(made, 6)
    assert made.left() == 0
    assert made.deal() is None
    assert dealt[4] is not None
    made.again(dealt[4], after=100)
    assert made.left() == 1
    assert deal(made, 2) == [dealt[4], None]


def test_a_group_leased_by_somebody_else_is_not_dealt() -> None:
    made = deck()
    first, second = deal(made, 2)
    assert first is not None
    assert second is not None
    made.again(first)
    made.again(second)
    made.take(first)
    made.take(first)
    assert made.deal() == second
    assert made.deal() not in (first, second)


def test_another_prompt_source_is_refused() -> None:
    made = deck(5)
    assert made.set_source(5, "sha")
    assert not made.set_source(6, "sha")
    assert not made.set_source(5, "other")


def test_without_rows_nothing_is_dealt() -> None:
    assert Deck(seed=0, epochs=0).deal() is None


def test_a_deck_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    store = Store(tmp_path, tables=TABLES, map_bytes=1 << 20, durability="process")
    made = deck(20)
    dealt = deal(made, 7)
    assert dealt[2] is not None
    assert dealt[3] is not None
    made.again(dealt[2])
    made.again(dealt[3])
    made.take(dealt[2])
    with store.write() as txn:
        made.save(txn)
    made.saved()
    assert not made.changed
    lost = made.deal()  # never saved
    again = Deck(seed=0, epochs=0)
    with store.read() as txn:
        again.load(txn)
    assert again.rows == 20
    assert lost == dealt[3]
    rest = deal(again, 14)
    assert rest[0] == dealt[3]
    assert sorted(group for group in {*dealt, *rest} if group is not None) == list(range(20))
    store.close()
