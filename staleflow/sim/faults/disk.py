"""Disks: committed data survives the death of its process; faults may fill, slow, break, flip or lose it.

A store is a ``MemoryStore`` that belongs to the disk and not to the process. A block is on the disk when it has ended;
a process may be killed just before (nothing of it was kept) or just after (no reply was sent). Slabs are real files in
the run's directory, because the processes of the run map them.
"""

import hashlib
import os
import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec

from staleflow.protocols.wire.payload_digest import payload_digest
from staleflow.servers.trajectories.records import Record
from staleflow.sim.virtual import Conductor, Killed, Process
from staleflow.store.base import Buffer, Durability, StoreError, StoreFull, key_number
from staleflow.store.memory import MemoryWrite, Tables, Undo

NEARLY_FULL: Final = 0.95
SMALL_BYTES: Final = 16
"""A block that writes no more than this finds room even on a full disk: it uses pages freed by deletes."""

KEY_BYTES: Final = 16
"""Key size of a row about a group: group and lease."""

SHA_BYTES: Final = 32
"""Digest in front of a row of records."""

When = Literal["", "before", "after"]
Loss = Literal["deleted", "emptied", "cut"]
"""Kind of loss of a slab file. Its name then belongs to another file or to none; a process that mapped it keeps all of
it."""


class Rows(dict[bytes, bytes]):
    """A table with a sorted list of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[bytes] = []

    def __setitem__(self, key: bytes, value: bytes) -> None:
        if key not in self:
            insort(self.order, key)
        super().__setitem__(key, value)

    def pop(self, key: bytes, default: bytes | None = None) -> bytes | None:  # type: ignore[override]
        if key not in self:
            return default
        del self.order[bisect_left(self.order, key)]
        return super().pop(key)


class SimWrite(MemoryWrite):
    """A ``MemoryWrite`` with fast access to the keys from ``start`` on, and a count of the bytes written."""

    def __init__(self, tables: Tables, undo: Undo) -> None:
        super().__init__(tables, undo)
        self.written = 0

    def keys(self, table: str, start: bytes = b"") -> Iterator[bytes]:
        rows = self._tables[table]
        assert isinstance(rows, Rows)
        return iter(rows.order[bisect_left(rows.order, start) :])

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        self.written += len(value)
        super().put(table, key, value)


class Disk:
    """All data of one server on disk. Outlives its processes."""

    def __init__(self, conductor: Conductor, rng: random.Random, slabs: Path | None = None) -> None:
        """``slabs`` is the folder of a shard's slabs."""
        self.tables: Tables = {}
        self.slabs = slabs
        self.lost: set[str] = set()
        """Names of slabs whose file was lost."""
        self.full = False
        """True if writing blocks fail and the map looks nearly full."""
        self.crowded = False
        """True if the map looks nearly full although it is not."""
        self.broken = False
        """True if every block fails for a reason other than lack of room."""
        self.sync_s = 0.0
        """Duration of a commit."""
        self.kill_at: When = ""
        """When the next commit kills its process."""
        self.counts: Counter[str] = Counter()
        self.flipped: set[tuple[int, int]] = set()
        """(group, lease) of changed or lost data."""
        self._conductor = conductor
        self._rng = rng

    def opener(self, process: Process) -> Callable[..., "SimStore"]:
        """Return the replacement of ``store.lmdb.Store`` for one process."""

        def opened(path: Path, *, tables: Sequence[str], map_bytes: int, durability: Durability) -> SimStore:
            for name in tables:
                self.tables.setdefault(name, Rows())
            return SimStore(self, process)

        return opened

    def commit(self, process: Process, written: int) -> None:
        """Let the block end, or raise the error that prevents it."""
        if self.broken:
            self.counts["broken"] += 1
            raise StoreError("the disk gives an error")
        if self.full and written > SMALL_BYTES:
            self.counts["full"] += 1
            raise StoreFull("there is no room")
        if self.kill_at == "before" and written:
            self.counts["killed before a commit"] += 1
            self.kill(process)
        if self.sync_s:
            self.counts["slow"] += 1
            process.busy_until_s = max(process.busy_until_s, self._conductor.now_s) + self.sync_s

    def committed(self, process: Process, written: int, undo: Undo) -> None:
        """Finish a committed block. Its data in a slab whose file is lost ends with the process."""
        if self.lost:
            rows = self.tables.get("records", {})
            self._note_lost({key: rows[key] for table, key, _ in undo if table == "records" and key in rows})
        if self.kill_at == "after" and written:
            self.counts["killed after a commit"] += 1
            self.kill(process)

    def kill(self, process: Process) -> None:
        self.kill_at = ""
        self._conductor.kill(process)
        raise Killed

    def lose(self) -> None:
        """Lose everything."""
        self.put_back({})
        self.put_back_slabs({})

    def copy(self) -> Tables:
        """Return a copy of the current state."""
        copies: Tables = {}
        for name, rows in self.tables.items():
            copies[name] = copy = Rows()
            for key, value in rows.items():
                copy[key] = value
        return copies

    def put_back(self, tables: Tables) -> None:
        """Replace everything by a state of another time."""
        for name, rows in self.tables.items():
            lost = rows.keys() - tables.get(name, {}).keys()
            self.flipped |= {(key_number(key[:8]), key_number(key[8:16])) for key in lost if len(key) >= KEY_BYTES}
        self.tables.clear()
        self.tables.update(tables)

    def flip(self, tables: Sequence[str]) -> tuple[str, bytes] | None:
        """Change one byte of one value of these tables, often the newest; return its place, or None if they are
        empty."""
        full = [name for name in tables if self.tables.get(name)]
        if "payloads" in tables and (placed := self._in_slabs()) and (not full or self._rng.random() < 0.5):
            return self._flip_in_slab(placed)
        if not full:
            return None
        name = self._rng.choice(full)
        rows = self.tables[name]
        assert isinstance(rows, Rows)
        key = next(reversed(rows)) if self._rng.random() < 0.5 else self._rng.choice(rows.order)
        value = bytearray(rows[key])
        value[self._rng.randrange(len(value))] ^= 1 << self._rng.randrange(8)
        rows[key] = bytes(value)
        self.flipped.add((key_number(key[:8]), key_number(key[8:16])))
        self.counts[f"flipped {name}"] += 1
        return name, key

    # --- slabs -----------------------------------------------------------------------------------------------

    def slab_files(self) -> list[Path]:
        """Return the files of all slabs, sorted by name."""
        return [] if self.slabs is None or not self.slabs.is_dir() else sorted(self.slabs.iterdir())

    def lose_slab(self, path: Path, loss: Loss) -> None:
        """Lose a file. Processes that have mapped it keep their pages, as after an unlink."""
        if loss == "deleted":
            path.unlink()
        else:
            other, kept = path.with_suffix(".lost"), path.read_bytes()
            other.write_bytes(kept[: len(kept) // 2] if loss == "cut" else b"")
            os.replace(other, path)
        self.lost.add(path.name)
        self.counts[f"slab {loss}"] += 1
        self._note_lost(self.tables.get("records", {}))

    def copy_slabs(self) -> dict[str, bytes]:
        """Return the content of the slabs, by name."""
        return {path.name: path.read_bytes() for path in self.slab_files()}

    def put_back_slabs(self, slabs: Mapping[str, bytes]) -> None:
        """Replace all slab files by these, which no process has mapped."""
        for path in self.slab_files():
            path.unlink()
        if self.slabs is not None and slabs:
            self.slabs.mkdir(parents=True, exist_ok=True)
            for name, data in slabs.items():
                (self.slabs / name).write_bytes(data)

    def payload_shas(self) -> dict[tuple[int, int], str]:
        """Return the sha of each stored payload by (group, lease); empty if its slab no longer has it."""
        blobs = dict(self.tables.get("payloads", {}))
        for key, record in self._in_slabs().items():
            blobs[key] = self._slab_bytes(record)
        return {_group_lease(key): payload_digest((blob,)) if blob else "" for key, blob in blobs.items()}

    def _in_slabs(self) -> dict[bytes, Record]:
        return _placed(self.tables.get("records", {}))

    def _slab_bytes(self, record: Record) -> bytes:
        assert self.slabs is not None
        try:
            data = (self.slabs / record.slab).read_bytes()[record.offset :][: record.nbytes]
        except FileNotFoundError:
            return b""
        return data if len(data) == record.nbytes else b""

    def _note_lost(self, rows: Mapping[bytes, bytes]) -> None:
        self.flipped |= {_group_lease(key) for key, record in _placed(rows).items() if record.slab in self.lost}

    def _flip_in_slab(self, placed: Mapping[bytes, Record]) -> tuple[str, bytes] | None:
        """Change one byte of a payload in a slab, which every process that mapped it sees."""
        assert self.slabs is not None
        keys = list(placed)
        key = keys[-1] if self._rng.random() < 0.5 else self._rng.choice(keys)
        record = placed[key]
        if not self._slab_bytes(record):
            return None
        place, bit = record.offset + self._rng.randrange(record.nbytes), 1 << self._rng.randrange(8)
        with (self.slabs / record.slab).open("r+b") as file:
            byte = os.pread(file.fileno(), 1, place)[0]
            os.pwrite(file.fileno(), bytes((byte ^ bit,)), place)
        self.flipped.add(_group_lease(key))
        self.counts["flipped in a slab"] += 1
        return record.slab, key


def _group_lease(key: bytes) -> tuple[int, int]:
    return key_number(key[:8]), key_number(key[8:16])


def _placed(rows: Mapping[bytes, bytes]) -> dict[bytes, Record]:
    """Return the records of payload in slabs; records with a changed row are skipped, as by a shard."""
    records: dict[bytes, Record] = {}
    for key, row in rows.items():
        if hashlib.sha256(key + row[SHA_BYTES:]).digest() == row[:SHA_BYTES]:
            record = msgspec.msgpack.decode(row[SHA_BYTES:], type=Record)
            if record.slab:
                records[key] = record
    return records


class SimStore:
    """The store of one process on a disk."""

    def __init__(self, disk: Disk, process: Process) -> None:
        self._disk = disk
        self._process = process

    @contextmanager
    def read(self) -> Generator[SimWrite]:
        yield SimWrite(self._disk.tables, [])

    @contextmanager
    def write(self) -> Generator[SimWrite]:
        undo: Undo = []
        write = SimWrite(self._disk.tables, undo)
        try:
            yield write
            self._disk.commit(self._process, write.written)
        except BaseException:
            for table, key, before in reversed(undo):
                if before is None:
                    self._disk.tables[table].pop(key, None)
                else:
                    self._disk.tables[table][key] = before
            raise
        self._disk.committed(self._process, write.written, undo)

    def used_share(self) -> float:
        return NEARLY_FULL if self._disk.full or self._disk.crowded else 0.1

    def close(self) -> None:
        """Do nothing: the disk outlives the process."""
