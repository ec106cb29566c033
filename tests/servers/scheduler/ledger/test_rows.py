"""The rows of the ledger are ordered by lease and deleted when their groups are forgotten."""

from pathlib import Path

from staleflow.protocols.consistency.ids import GroupId
from staleflow.servers.scheduler.ledger.interpreter import GROUPS, LedgerRows
from staleflow.store.base import key_number
from staleflow.store.lmdb import Store
from tests.protocols.consistency.scenes import Scene

BATCH = 12


def opened(path: Path) -> Store:
    return Store(path, tables=("meta", GROUPS), map_bytes=1 << 24, durability="process")


def places(store: Store) -> list[int]:
    with store.read() as txn:
        return [key_number(key) for key in txn.keys(GROUPS)]


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


def test_a_store_has_the_rows_of_the_ledger_and_no_others(tmp_path: Path) -> None:
    store, rows, scene = opened(tmp_path), LedgerRows(), trained(BATCH)
    with store.write() as txn:
        rows.save(txn, scene.machine)
    scene.checkpointed(1)
    for _ in range(4):
        scene.reserve(7, version=1)
        with store.write() as txn:
            rows.save(txn, scene.machine)
        assert len(places(store)) == len(scene.machine.rows())
        again = LedgerRows()
        with store.read() as txn:
            machine = again.load(txn, scene.limits, now_ms=0)
        assert machine.snapshot() == scene.machine.snapshot()
        rows, scene.machine = again, machine
        scene.release(7)
        scene.at(1)
    assert len(scene.machine.rows()) < BATCH, "nothing was forgotten"
    store.close()


def test_a_group_that_is_leased_anew_has_one_row(tmp_path: Path) -> None:
    store, rows, scene = opened(tmp_path), LedgerRows(), Scene(max_staleness=0, batch_size=2)
    for _ in range(2):
        scene.reserve(7, version=0)
        with store.write() as txn:
            rows.save(txn, scene.machine)
        scene.release(7)
    with store.read() as txn:
        machine = LedgerRows().load(txn, scene.limits, now_ms=0)
    assert places(store) == [2]
    assert machine.group(GroupId(7)) is not None
    store.close()
