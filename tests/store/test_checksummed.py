"""A record that changed on disk is rejected and never read as different data."""

from pathlib import Path

import pytest

from staleflow.store.base import StoreCorrupt
from staleflow.store.checksummed import CheckedStore
from staleflow.store.lmdb import Store
from staleflow.store.memory import MemoryStore

NOWHERE = Path("/nowhere/data.mdb")


def stores() -> tuple[MemoryStore, CheckedStore]:
    inner = MemoryStore(("a", "b"))
    return inner, CheckedStore(inner, NOWHERE)


def test_what_was_put_is_read_and_what_is_deleted_is_gone() -> None:
    _, store = stores()
    with store.write() as txn:
        txn.put("a", b"k", b"value")
        txn.put("a", b"l", b"")
        assert (txn.get("a", b"k"), txn.get("a", b"m"), txn.size("a", b"k"), txn.size("a", b"m")) == (
            b"value",
            None,
            5,
            None,
        )
        assert (txn.delete("a", b"k"), txn.delete("a", b"k")) == (True, False)
    with store.read() as view:
        assert list(view.items("a")) == [(b"l", b"")]
        assert (list(view.keys("a")), view.count("a"), view.count("b")) == ([b"l"], 1, 0)


@pytest.mark.parametrize("place", range(9))
@pytest.mark.parametrize("bit", range(8))
def test_any_changed_bit_of_a_value_is_named_with_its_table_and_key(place: int, bit: int) -> None:
    inner, store = stores()
    with store.write() as txn:
        txn.put("a", b"k", b"value")
    with inner.write() as raw:
        changed = bytearray(raw.get("a", b"k") or b"")
        changed[place] ^= 1 << bit
        raw.put("a", b"k", changed)
    with store.read() as view:
        for look in (lambda: view.get("a", b"k"), lambda: list(view.items("a")), lambda: list(view.keys("a"))):
            with pytest.raises(StoreCorrupt, match=r"/nowhere/data\.mdb is damaged: record 6b of table a"):
                look()


@pytest.mark.parametrize("raw", [b"", b"abc"])
def test_a_value_under_another_key_or_cut_short_is_not_believed(raw: bytes) -> None:
    inner, store = stores()
    with store.write() as txn:
        txn.put("a", b"k", b"value")
    with inner.write() as under:
        under.put("a", b"l", under.get("a", b"k") or b"")
        under.put("b", b"k", raw)
    with store.read() as view:
        assert view.get("a", b"k") == b"value"
        for table, key in (("a", b"l"), ("b", b"k")):
            with pytest.raises(StoreCorrupt):
                view.get(table, key)


def test_it_is_as_durable_and_as_full_as_what_it_lies_on(tmp_path: Path) -> None:
    under = Store(tmp_path, tables=("a",), map_bytes=1 << 20, durability="process")
    store = CheckedStore(under, tmp_path / "data.mdb")
    with store.write() as txn:
        txn.put("a", b"k", bytes(100_000))
    assert store.used_share() == under.used_share() > 0.05
    store.close()
    again = CheckedStore(Store(tmp_path, tables=("a",), map_bytes=1 << 20, durability="process"), tmp_path)
    with again.read() as view:
        assert view.get("a", b"k") == bytes(100_000)
    again.close()
