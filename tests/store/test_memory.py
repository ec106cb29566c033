"""The store in memory keeps and deletes the same data as the one on disk."""

import random
from pathlib import Path

import pytest

from staleflow.store import lmdb as lmdb_store
from staleflow.store import memory as memory_store
from staleflow.store.base import Store, Write, number_key

TABLES = ("a", "b")


class Undone(Exception):
    """Raised to leave a block without committing it."""


def contents(store: Store) -> list[object]:
    """Return all readable data, by every read method."""
    with store.read() as txn:
        return [
            (
                list(txn.items(table)),
                list(txn.items(table, number_key(5))),
                list(txn.keys(table)),
                list(txn.keys(table, number_key(5))),
                txn.count(table),
                [txn.get(table, number_key(key)) for key in range(10)],
            )
            for table in TABLES
        ]


def act(txn: Write, draw: random.Random) -> object:
    """Apply one random operation; return its result."""
    table, key, value = draw.choice(TABLES), number_key(draw.randrange(10)), bytes([draw.randrange(256)])
    match draw.randrange(4):
        case 0:
            txn.put(table, key, value)
            return None
        case 1:
            txn.put(table, number_key(3), memoryview(value))
            return None
        case 2:
            return txn.delete(table, key)
        case _:
            return txn.get(table, key), txn.count(table), list(txn.items(table))


@pytest.mark.parametrize("seed", range(3))
def test_random_transactions_leave_the_same_behind(tmp_path: Path, seed: int) -> None:
    disk = lmdb_store.Store(tmp_path, tables=TABLES, map_bytes=16 << 20, durability="process")
    memory = memory_store.MemoryStore(TABLES)
    both: tuple[Store, Store] = (disk, memory)
    draw = random.Random(seed)
    for _ in range(200):
        actions, kept = draw.randrange(8), draw.random() < 0.7
        of_block = draw.random()
        said: list[list[object]] = []
        for store in both:
            again = random.Random(of_block)
            told: list[object] = []
            try:
                with store.write() as txn:
                    told += [act(txn, again) for _ in range(actions)]
                    if not kept:
                        raise Undone
            except Undone:
                pass
            said.append([*told, *contents(store)])
        assert said[0] == said[1]
    disk.close()


def test_it_is_never_full() -> None:
    assert memory_store.MemoryStore(TABLES).used_share() == 0.0
