"""A simulated disk keeps committed data, drops uncommitted data, and can produce every fault of a real disk."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from staleflow.sim.faults.disk import Disk, SimStore
from staleflow.sim.virtual import Conductor, Process
from staleflow.store.base import StoreError, StoreFull


def opened() -> tuple[Disk, Callable[[], SimStore]]:
    conductor = Conductor()
    disk = Disk(conductor, random.Random(1))

    def store() -> SimStore:
        process = Process(conductor, "p")
        process.loop.close()
        return disk.opener(process)(Path(), tables=("t",), map_bytes=1, durability="power")

    return disk, store


def put(store: SimStore, key: bytes, value: bytes = bytes(20)) -> None:
    with store.write() as txn:
        txn.put("t", key, value)


def keys(store: SimStore) -> list[bytes]:
    with store.read() as txn:
        return list(txn.keys("t"))


@pytest.mark.parametrize(("when", "left"), [("before", []), ("after", [b"a"])])
def test_a_kill_at_a_commit_comes_before_it_or_after_it(when: str, left: list[bytes]) -> None:
    disk, store = opened()
    disk.kill_at = when  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        put(store(), b"a")
    assert keys(store()) == left


def test_a_full_disk_takes_deletes_and_a_broken_one_nothing() -> None:
    disk, store = opened()
    put(store(), b"a")
    disk.full = True
    with pytest.raises(StoreFull):
        put(store(), b"b")
    with store().write() as txn:
        assert txn.delete("t", b"a")
    disk.full, disk.broken = False, True
    with pytest.raises(StoreError, match="gives an error"):
        put(store(), b"c")
    assert keys(store()) == []


def test_a_flipped_byte_is_one_bit_of_one_value() -> None:
    disk, store = opened()
    put(store(), bytes(16))
    assert disk.flip(("t",)) == ("t", bytes(16))
    with store().read() as txn:
        value = txn.get("t", bytes(16)) or b""
    assert sum(byte.bit_count() for byte in value) == 1
    assert disk.flipped == {(0, 0)}
