"""A shard's store on disk, copies of it with changed bytes, and the contents that a separate reader process finds.

``python -m tests.servers.trajectories.damaged`` reads folders from its standard input, each in a separate child because
a damaged page may kill the process, and prints one JSON line for each.
"""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np

from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.messages import PushItem
from staleflow.protocols.wire.payload_digest import payload_digest
from staleflow.protocols.wire.stages import REWARD, REWARD_COLUMN
from staleflow.protocols.wire.tensors import Array, pieces, specs_and_frames
from staleflow.servers.trajectories.records import Key, Pushed, parse_push
from staleflow.servers.trajectories.slabs import Slabs
from staleflow.servers.trajectories.store import TABLES, Columns, CorruptRecord, TrajectoryStore, unpack_verified
from staleflow.store.base import StoreCorrupt
from staleflow.store.lmdb import Store
from tests.servers.running import GROUP_SIZE, payload

MAP_BYTES = 32 << 20
TOKENS = (5, 60, 900)
"""Tokens of each sample: some payloads fit into a page, others span several."""


class Original(NamedTuple):
    """A store with one rewarded group under each of its leases."""

    data: bytes
    """The file, live pages only."""
    slabs: dict[str, bytes]
    """Contents of its slabs by name; if slabs exist, payload is stored there instead."""
    groups: dict[Key, dict[str, Array]]
    shas: dict[Key, str]
    values: list[tuple[Key, bytes]]
    """Every live value of its tables and slabs, with its key."""

    @property
    def files(self) -> dict[str, bytes]:
        """Contents of all files, by path."""
        return {"data.mdb": self.data} | {f"slabs/{name}": data for name, data in self.slabs.items()}


def opened(path: Path) -> tuple[Store, TrajectoryStore]:
    """Open a store, with slabs if their folder exists."""
    store = Store(path, tables=TABLES, map_bytes=MAP_BYTES, durability="process")
    slabs = Slabs(path / "slabs", map_bytes=MAP_BYTES) if (path / "slabs").is_dir() else None
    return store, TrajectoryStore(store, map_bytes=MAP_BYTES, slabs=slabs)


def original(folder: Path, count: int, *, mapped: bool = False) -> Original:
    """Make a store of ``count`` groups; ``mapped``: their payload is in slabs."""
    if mapped:
        (folder / "first" / "slabs").mkdir(parents=True)
    store, trajectories = opened(folder / "first")
    values: list[tuple[Key, bytes]] = []
    groups: dict[Key, dict[str, Array]] = {}
    shas: dict[Key, str] = {}
    for number in range(count):
        one = _group(number)
        reward = np.asarray([number, number + 0.5], np.float32)
        (record,) = trajectories.write_pushes([one])
        assert bool(record.slab) == mapped
        if mapped:
            values.append((one.key, bytes(trajectories.payload(one.key, record))))
        trajectories.write_columns([Columns(one.key, REWARD, {REWARD_COLUMN: reward})])
        groups[one.key] = unpack_verified(one.key, one.record, one.blob) | {REWARD_COLUMN: reward}
        shas[one.key] = one.record.sha
    store.close()
    (folder / "live").mkdir()
    with lmdb.Environment(str(folder / "first"), max_dbs=8, map_size=MAP_BYTES) as environment:
        environment.copy(str(folder / "live"), compact=True)
    data = (folder / "live" / "data.mdb").read_bytes()
    slabs = {path.name: path.read_bytes() for path in (folder / "first").glob("slabs/*")}
    return Original(data, slabs, groups, shas, values + _values(folder / "live"))


def _group(number: int) -> Pushed:
    specs, frames = specs_and_frames(payload(0, seed=number, tokens=TOKENS[number % len(TOKENS)]).to_arrays())
    item = PushItem(
        group=GroupId(number), lease=LeaseId(100 + number), worker=WorkerId("w"), truncated=False, frames=specs
    )
    return parse_push(item, frames, GROUP_SIZE)


def _values(folder: Path) -> list[tuple[Key, bytes]]:
    found: list[tuple[Key, bytes]] = []
    with lmdb.Environment(str(folder), max_dbs=8, map_size=MAP_BYTES, readonly=True, lock=False) as environment:
        for table in ("records", "payloads", "columns"):
            opened_table = environment.open_db(table.encode(), create=False)
            with environment.begin() as txn:
                for raw, value in txn.cursor(opened_table):
                    group, lease = (int.from_bytes(raw[start : start + 8], "big") for start in (0, 8))
                    found.append((Key(GroupId(group), LeaseId(lease)), bytes(value)))
    return found


def copied(folder: Path, files: dict[str, bytes]) -> Path:
    """Write these files as a store."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def named(arrays: dict[str, Array]) -> str:
    """Digest of arrays."""
    return payload_digest(pieces(arrays))


def read(folder: Path) -> dict[str, str] | str:
    """Return payload and reward of each lease, or that it is damaged; or the reason why the store is refused."""
    found: dict[str, str] = {}
    try:
        store, trajectories = opened(folder)
        for key, record, _ in trajectories.load():
            try:
                if record is None:
                    raise CorruptRecord(key, "the record")
                arrays = unpack_verified(key, record, trajectories.payload(key, record))
                found[str(key.lease)] = named(arrays | trajectories.columns([(key, record, (REWARD,))], (REWARD,))[0])
            except CorruptRecord:
                found[str(key.lease)] = "damaged"
        store.close()
    except StoreCorrupt as error:
        return str(error)
    return found


def main() -> None:
    """Read every folder named on the standard input."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # LMDB prints its complaints there
            print(json.dumps(read(Path(line.strip()))), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps(f"ended by signal {os.WTERMSIG(status)}"), flush=True)


if __name__ == "__main__":
    main()
