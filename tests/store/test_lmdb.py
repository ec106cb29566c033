"""A store keeps committed data, rejects foreign files and writes beyond its map, and has one opener at a time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.store.base import Durability, StoreCorrupt, StoreFull, StoreInUse, key_number, number_key
from staleflow.store.lmdb import Store

SMALL = 1 << 20


def opened(path: Path, *, map_bytes: int = 16 << 20, durability: Durability = "process") -> Store:
    return Store(path, tables=("a", "b"), map_bytes=map_bytes, durability=durability)


@pytest.mark.parametrize("durability", ["process", "power"])
def test_what_was_committed_is_there_after_reopening(tmp_path: Path, durability: Durability) -> None:
    store = opened(tmp_path, durability=durability)
    with store.write() as txn:
        txn.put("a", b"k", b"v")
        assert txn.get("a", b"k") == b"v"
        assert txn.get("b", b"k") is None
    store.close()
    store.close()
    with opened(tmp_path).read() as txn:
        assert txn.get("a", b"k") == b"v"
        assert (txn.count("a"), txn.count("b")) == (1, 0)


def test_a_block_that_raises_leaves_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)

    def fail() -> None:
        with store.write() as txn:
            txn.put("a", b"k", b"v")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with store.read() as txn:
        assert txn.get("a", b"k") is None


def test_a_view_of_the_past_does_not_change(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with store.read() as before:
        with store.write() as txn:
            txn.put("a", b"k", b"v")
        assert before.get("a", b"k") is None


def test_numbers_are_ordered_as_keys(tmp_path: Path) -> None:
    numbers = [0, 1, 255, 256, 2**32, 2**63]
    assert [key_number(number_key(number)) for number in numbers] == numbers
    store = opened(tmp_path)
    with store.write() as txn:
        for number in reversed(numbers):
            txn.put("a", number_key(number), b"%d" % number)
    with store.read() as txn:
        assert [key_number(key) for key in txn.keys("a")] == numbers
        assert [value for _, value in txn.items("a", number_key(256))] == [b"256", b"4294967296", b"%d" % 2**63]


def test_a_view_is_what_was_put_and_what_is_deleted_is_gone(tmp_path: Path) -> None:
    with opened(tmp_path).write() as txn:
        txn.put("a", b"k", b"value")
        view = txn.view("a", b"k")
        assert view is not None
        assert bytes(view) == b"value"
        assert txn.delete("a", b"k")
        assert not txn.delete("a", b"k")


def test_a_full_map_refuses_the_whole_block_and_recovers_when_space_is_freed(tmp_path: Path) -> None:
    store = opened(tmp_path, map_bytes=SMALL)
    with store.write() as txn:
        txn.put("a", b"old", bytes(400_000))

    def overfill() -> None:
        with store.write() as txn:
            txn.put("b", b"small", b"v")
            txn.put("b", b"large", bytes(SMALL))

    with pytest.raises(StoreFull):
        overfill()
    with store.read() as after:
        assert after.get("b", b"small") is None
        assert after.get("a", b"old") == bytes(400_000)
    assert store.used_share() > 0.35
    with store.write() as freeing:
        freeing.delete("a", b"old")
    assert store.used_share() < 0.1
    for turn in range(10):  # freed pages are used again
        with store.write() as filling:
            filling.put("a", b"new", bytes([turn]) * 150_000)


def test_a_second_opener_is_told_who_has_it(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(StoreInUse, match=str(os.getpid())):
        opened(tmp_path)
    store.close()
    opened(tmp_path).close()


def test_a_file_that_is_not_a_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"junk" * 5_000)
    with pytest.raises(StoreCorrupt, match=r"data\.mdb"):
        opened(tmp_path)


KILLED = """
import os, signal, sys
from pathlib import Path
from staleflow.store.lmdb import Store
from staleflow.store.base import number_key
store = Store(Path(sys.argv[1]), tables=("a",), map_bytes=16 << 20, durability="process")
for number in range(100):
    with store.write() as txn:
        txn.put("a", number_key(number), b"v")
    print(number, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_committed_survives_kill_9(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    store = Store(tmp_path, tables=("a",), map_bytes=16 << 20, durability="process")
    with store.read() as txn:
        assert [key_number(key) for key in txn.keys("a")] == list(range(100))
    store.close()
