"""Rows of the ledger lie by lease, and those that a checkpoint lets go of are deleted a few a commit."""

from pathlib import Path

import pytest

from staleflow.protocols.consistency.ids import GroupId
from staleflow.runtime.lmdb_store import Store, key_number
from staleflow.servers.scheduler import ledger_rows
from staleflow.servers.scheduler.ledger_rows import TABLE, LedgerRows
from tests.protocols.consistency.scenes import Scene

BATCH = 12


@pytest.fixture(autouse=True)
def _four_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_rows, "DELETES", 4)


def opened(path: Path) -> Store:
    return Store(path, tables=("meta", TABLE), map_bytes=1 << 24, durability="process")


def places(store: Store) -> list[int]:
    with store.read() as txn:
        return [key_number(key) for key in txn.keys(TABLE)]


def trained(batch_size: int) -> Scene:
    scene = Scene(max_staleness=0, batch_size=batch_size)
    ids = range(1000, 1000 + batch_size)
    scene.reserve(*ids, version=0)
    scene.finish(*ids)
    scene.train(0)
    return scene


def test_a_row_lies_at_its_groups_lease(tmp_path: Path) -> None:
    store, rows, scene = opened(tmp_path), LedgerRows(), Scene(max_staleness=0, batch_size=2)
    scene.reserve(70, 7, version=0)
    with store.write() as txn:
        rows.save(txn, scene.machine)
    leases = [view.lease for group in (70, 7) if (view := scene.machine.group(GroupId(group))) is not None]
    assert places(store) == leases
    store.close()


def test_what_a_checkpoint_lets_go_is_deleted_over_some_commits_and_never_comes_back(tmp_path: Path) -> None:
    store, rows, scene = opened(tmp_path), LedgerRows(), trained(BATCH)
    with store.write() as txn:
        rows.save(txn, scene.machine)
    before = len(places(store))
    scene.checkpointed(1)
    with store.write() as txn:
        rows.save(txn, scene.machine)
    assert len(places(store)) > before - BATCH, "everything was deleted at once"

    again = LedgerRows()
    with store.read() as txn:
        machine = again.load(txn, scene.limits)
    assert machine.snapshot() == scene.machine.snapshot()
    for _ in range(3):
        with store.write() as txn:
            again.save(txn, machine)
    assert len(places(store)) == len(machine.rows())
    store.close()


def test_of_two_rows_of_one_group_the_newer_lease_counts(tmp_path: Path) -> None:
    store, rows, scene = opened(tmp_path), LedgerRows(), trained(BATCH)
    with store.write() as txn:
        rows.save(txn, scene.machine)
    scene.checkpointed(1)  # its deletions come first
    scene.reserve(7, version=1)
    with store.write() as txn:
        rows.save(txn, scene.machine)
    scene.release(7)
    scene.reserve(7, version=1)
    with store.write() as txn:
        rows.save(txn, scene.machine)
    first, second = 1 + BATCH, 2 + BATCH
    assert {first, second} <= set(places(store)), "the older row is gone already: nothing is tested"
    with store.read() as txn:
        machine = LedgerRows().load(txn, scene.limits)
    assert machine.group(GroupId(7)) == scene.machine.group(GroupId(7))
    store.close()
