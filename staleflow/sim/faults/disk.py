"""Disks: what is committed survives the death of its process, and faults may fill, slow, break or flip them.

A store is a ``MemoryStore`` that belongs to the disk and not to the process. A block is on the disk when it has ended;
a process may be killed just before (nothing of it was kept) or just after (nobody was told).
"""

import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from staleflow.runtime.memory_store import MemoryWrite, Tables, Undo
from staleflow.runtime.store import Buffer, Durability, StoreError, StoreFull, key_number
from staleflow.sim.virtual import Conductor, Killed, Process

NEARLY_FULL: Final = 0.95
SMALL_BYTES: Final = 16
"""A block that writes no more than this finds room even on a full disk: it takes pages that deletes gave back."""

KEY_BYTES: Final = 16
"""Of a row about a group: group and lease."""

When = Literal["", "before", "after"]


class Rows(dict[bytes, bytes]):
    """A table whose keys are also there in order."""

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
    """As ``MemoryWrite``, with a short way to the keys from ``start`` on, and a count of what is written."""

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
    """What one server has on disk. Outlives its processes."""

    def __init__(self, conductor: Conductor, rng: random.Random) -> None:
        self.tables: Tables = {}
        self.full = False
        """Blocks that write fail, and the map looks nearly full."""
        self.crowded = False
        """The map looks nearly full, and is not."""
        self.broken = False
        """Every block fails, and not for lack of room."""
        self.sync_s = 0.0
        """What a commit takes."""
        self.kill_at: When = ""
        """When the next commit kills its process."""
        self.counts: Counter[str] = Counter()
        self.flipped: set[tuple[int, int]] = set()
        """(group, lease) of what was changed, or lost."""
        self._conductor = conductor
        self._rng = rng

    def opener(self, process: Process) -> Callable[..., "SimStore"]:
        """What ``lmdb_store.Store`` is to that process."""

        def opened(path: Path, *, tables: Sequence[str], map_bytes: int, durability: Durability) -> SimStore:
            for name in tables:
                self.tables.setdefault(name, Rows())
            return SimStore(self, process)

        return opened

    def commit(self, process: Process, written: int) -> None:
        """Let the block end, or raise what keeps it from ending."""
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

    def committed(self, process: Process, written: int) -> None:
        """The block has ended."""
        if self.kill_at == "after" and written:
            self.counts["killed after a commit"] += 1
            self.kill(process)

    def kill(self, process: Process) -> None:
        self.kill_at = ""
        self._conductor.kill(process)
        raise Killed

    def lose(self) -> None:
        """All of it."""
        self.put_back({})

    def copy(self) -> Tables:
        """Return everything as it is now."""
        copies: Tables = {}
        for name, rows in self.tables.items():
            copies[name] = copy = Rows()
            for key, value in rows.items():
                copy[key] = value
        return copies

    def put_back(self, tables: Tables) -> None:
        """Replace everything by what was there at another time."""
        for name, rows in self.tables.items():
            lost = rows.keys() - tables.get(name, {}).keys()
            self.flipped |= {(key_number(key[:8]), key_number(key[8:16])) for key in lost if len(key) >= KEY_BYTES}
        self.tables.clear()
        self.tables.update(tables)

    def flip(self, tables: Sequence[str]) -> tuple[str, bytes] | None:
        """Change one byte of one value of these tables, often the newest; which, or None when they are empty."""
        full = [name for name in tables if self.tables.get(name)]
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


class SimStore:
    """One process's hold on a disk."""

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
        self._disk.committed(self._process, write.written)

    def used_share(self) -> float:
        return NEARLY_FULL if self._disk.full or self._disk.crowded else 0.1

    def close(self) -> None:
        """The disk stays."""
