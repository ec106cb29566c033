"""A few ordered tables in one LMDB file, written by one process, one transaction per group commit.

- Everything written inside one ``write()`` block becomes visible and durable together, or not at all.
- ``durability = "process"``: a committed block has reached the page cache and survives ``kill -9`` of this process.
  ``"power"``: it is synced to disk before the block ends.
- The file never exceeds ``map_bytes``. A write without room raises ``StoreFull`` and changes nothing; reads and deletes
  continue. ``writemap`` is off, so that a full disk is an error code here and not a SIGBUS.
- One process at a time: a second opener gets ``StoreInUse``. A killed owner leaves nothing to clean up.
- A page that LMDB rejects, and a table whose records differ from its count, raise ``StoreCorrupt`` with the file's
  name. Bytes inside a value are for the owner to check: LMDB has no checksums.
"""

import fcntl
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import lmdb

from staleflow.configs.durable_files import make_folder, sync_path
from staleflow.store import disk_errors as disk
from staleflow.store.base import Buffer, DiskFull, Durability, StoreCorrupt, StoreError, StoreFull, StoreInUse
from staleflow.store.disk_errors import State

FILE = "data.mdb"
"""Name of the data file, in the folder of the store."""
PID_BYTES = 32
"""Size of the file that names the owner's process; it is written in place."""
_FULL_BYTES = 1 << 20
"""A disk with less free space than this counts as full."""
_INLINE_BYTES = 2_048
"""Smaller values are stored in pages that LMDB checks as a whole."""
_SLACK_BYTES = 1 << 18
"""Padding after the last page: LMDB's offsets and key lengths inside a page have 16 bits each."""
_DAMAGED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.BadDbiError, lmdb.InvalidError)


class Read:
    """A consistent view of all tables, until its block ends."""

    def __init__(self, txn: "lmdb.Transaction[memoryview]", tables: dict[str, Any], file: Path) -> None:
        self._txn = txn
        self._tables = tables
        self._file = file

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return a copy of the value, or None if there is none."""
        value = self._txn.get(key, None, self._tables[table])
        return None if value is None else self._copied(value)

    def view(self, table: str, key: bytes) -> memoryview | None:
        """Return the value without a copy. Valid until the block ends, and until the first write of a ``write()``
        block."""
        return self._txn.get(key, None, self._tables[table])

    def size(self, table: str, key: bytes) -> int | None:
        """Return the size of the value in bytes without reading it, or None if there is none."""
        value = self._txn.get(key, None, self._tables[table])
        return None if value is None else value.nbytes

    def items(self, table: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield copies of (key, value) in order of key, from ``start`` on."""
        with self._txn.cursor(self._tables[table]) as cursor:
            for key in self._checked_keys(table, cursor, start):
                yield key, self._copied(cursor.value())

    def keys(self, table: str, start: bytes = b"") -> Iterator[bytes]:
        """Yield the keys in order, from ``start`` on."""
        with self._txn.cursor(self._tables[table]) as cursor:
            yield from self._checked_keys(table, cursor, start)

    def count(self, table: str) -> int:
        """Return the number of records of the table."""
        return self._txn.stat(self._tables[table])["entries"]

    def _checked_keys(self, table: str, cursor: "lmdb.Cursor[memoryview]", start: bytes) -> Iterator[bytes]:
        """Yield copies of the keys. A walk over a whole table that misses any of its records, or finds them out of
        order, has passed a damaged page."""
        expected, count, previous = self.count(table), 0, b""
        positioned = cursor.set_range(start) if start else cursor.first()
        for view in cursor.iternext(keys=True, values=False) if positioned else ():
            key = bytes(view)
            if count and key <= previous:
                raise self._corrupt(f"table {table} is out of order")
            count, previous = count + 1, key
            yield key
        if not start and count != expected == self.count(table):
            raise self._corrupt(f"table {table} lists {count} of its {expected} records")

    def _copied(self, value: memoryview) -> bytes:
        size = value.nbytes
        # a copy would read past the end of the file, which is SIGBUS
        if size > _INLINE_BYTES and size > self._file.stat().st_size:
            raise self._corrupt(f"a value claims a size of {size} bytes")
        return bytes(value)

    def _corrupt(self, what: str) -> StoreCorrupt:
        return StoreCorrupt(f"{self._file} is damaged: {what}")


class Write(Read):
    """One transaction: kept as a whole when its block ends, discarded when the block raises."""

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """Set ``key``, overwriting any old value."""
        self._txn.put(key, value, db=self._tables[table])

    def delete(self, table: str, key: bytes) -> bool:
        """Delete ``key``; return whether it existed."""
        return self._txn.delete(key, db=self._tables[table])


class Store:
    """The tables ``tables`` in the directory ``path``, which is created if it is missing.

    Raises ``StoreInUse`` if another process has it open, ``StoreCorrupt`` if the file is not one of LMDB's.
    """

    def __init__(self, path: Path, *, tables: Sequence[str], map_bytes: int, durability: Durability) -> None:
        self.path = path
        self._file = path / FILE
        self.map_bytes = map_bytes
        self._names = tuple(tables)
        self._sync = durability == "power"
        self._writable = True
        """True if LMDB has the file open for writing; False while its file system is read-only."""
        make_folder(path)
        self._owner = self._lock_owner()
        try:
            self._env = self._open()
            self._pad_tail()
            self._tables = self._open_tables()
            if self._sync:  # LMDB syncs its file, but not the folder entry of the file
                sync_path(path)
        except BaseException:
            os.close(self._owner)
            raise

    def _lock_owner(self) -> int:
        try:
            owner = os.open(self.path / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if (state := disk.state_of(error)) is None:
                raise
            raise DiskFull(f"{self.path}: {error.strerror}", state) from error
        try:
            # The kernel releases the lock when the owner dies, however it dies.
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.read(owner, PID_BYTES).decode(errors="replace").strip()
            os.close(owner)
            raise StoreInUse(f"{self.path} is in use by process {pid or 'unknown'}") from None
        with suppress(OSError):  # on a full disk the file names no owner, but the lock still holds
            os.pwrite(owner, f"{os.getpid():<{PID_BYTES - 1}}\n".encode(), 0)
        return owner

    def _open(self, *, readonly: bool = False) -> lmdb.Environment:
        try:
            return lmdb.Environment(
                str(self.path),
                map_size=self.map_bytes,
                max_dbs=len(self._names),
                sync=self._sync,
                metasync=self._sync,
                writemap=False,
                readahead=False,
                max_spare_txns=2,
                readonly=readonly,
                lock=not readonly,
            )
        except lmdb.Error as error:
            if (state := disk.state_of(error)) is not None:
                raise DiskFull(f"{self._file} cannot be opened: {error}", state) from error
            raise StoreCorrupt(f"{self._file} cannot be opened: {error}") from error

    def _open_tables(self) -> dict[str, Any]:
        try:
            self._env.reader_check()
            if not self._writable:  # a table handle opened in a read transaction would end with that transaction
                return {name: self._env.open_db(name.encode(), create=False) for name in self._names}
            with self._env.begin(write=True) as txn:  # all tables or none: a missing one has been lost
                existing = {bytes(name).decode(errors="replace") for name, _ in txn.cursor()}
                if existing and existing != {*self._names}:
                    raise StoreCorrupt(f"{self._file} has the tables {sorted(existing)}, not {sorted(self._names)}")
                return {name: self._env.open_db(name.encode(), txn) for name in self._names}
        except StoreCorrupt:
            self._env.close()
            raise
        except lmdb.MapFullError as error:
            self._env.close()
            raise StoreFull(f"{self.path} has no room for its tables in {self.map_bytes} bytes") from error
        except lmdb.Error as error:
            self._env.close()
            if (state := disk.state_of(error)) is not None:
                raise DiskFull(f"{self._file}: {error}", state) from error
            raise StoreCorrupt(f"{self._file} cannot be read: {error}") from error

    def _pad_tail(self) -> None:
        """Pad the file with zeros, which LMDB or a checksum rejects, for a lost tail and for damaged lengths that point
        past the end: a read past the end of a file is SIGBUS. The padding is sparse and takes no disk space."""
        pages = self._env.info()["last_pgno"] + 1
        wanted = min(pages * self._env.stat()["psize"] + _SLACK_BYTES, self.map_bytes)
        if self._file.stat().st_size < wanted:
            os.truncate(self._file, wanted)

    @contextmanager
    def read(self) -> Generator[Read]:
        """Open a view of the last commit. Raises ``StoreCorrupt`` if LMDB rejects a page of it."""
        try:
            with self._env.begin(buffers=True) as txn:
                yield Read(txn, self._tables, self._file)
        except lmdb.Error as error:
            raise StoreCorrupt(f"{self._file} is damaged: {error}") from error

    @contextmanager
    def write(self) -> Generator[Write]:
        """Open a transaction, committed when the block ends.

        Raises ``StoreFull``, ``DiskFull`` or ``StoreError`` if the commit fails; then, as when the block itself raises,
        nothing of it was kept.
        """
        if not self._writable:
            self._reopen()
        try:
            with self._env.begin(write=True, buffers=True) as txn:
                yield Write(txn, self._tables, self._file)
        except lmdb.MapFullError as error:
            raise StoreFull(f"{self.path}: {self.map_bytes} bytes are used up") from error
        except _DAMAGED as error:
            raise StoreCorrupt(f"{self._file} is damaged: {error}") from error
        except lmdb.Error as error:
            state = self._state(error)
            with suppress(DiskFull):  # the next write retries
                self._reopen()
            if state is not None:
                raise DiskFull(f"{self.path}: {error}", state) from error
            raise StoreError(f"{self.path}: {error}") from error

    def _state(self, error: lmdb.Error) -> State | None:
        """Return why the disk took no write. LMDB reports a partial write as an input/output error; that part has
        filled the last free space."""
        state = disk.state_of(error)
        if state == "failing":
            room = os.statvfs(self.path)
            return "disk" if room.f_bavail * room.f_frsize < _FULL_BYTES else state
        return state

    def _reopen(self) -> None:
        """Open a fresh environment, which sees the last commit: after a failed write of its meta page LMDB rejects
        everything. Give the disk space of the failed write back.

        Raises ``DiskFull`` if the file cannot be opened for writing now; the environment then serves reads.
        """
        self._env.close()
        try:
            self._writable = True
            self._env = self._open()
            self._cut_tail()
            self._tables = self._open_tables()
        except (DiskFull, OSError) as error:
            if (state := error.resource if isinstance(error, StoreFull) else disk.state_of(error)) is None:
                raise
            self._env.close()
            self._writable = False
            self._env = self._open(readonly=True)
            self._tables = self._open_tables()
            raise DiskFull(str(error), cast("State", state)) from error

    def _cut_tail(self) -> None:
        committed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if self._file.stat().st_size > committed:
            os.truncate(self._file, committed)
        self._pad_tail()

    def used_share(self) -> float:
        """Return the share of the map that live records take, 0 to 1; freed pages count as room."""
        with self._env.begin() as txn:
            stats = [txn.stat(table) for table in self._tables.values()]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return pages * stats[0]["psize"] / self.map_bytes

    def verify(self) -> None:
        """Read every record, in order and by key, and the list of free pages. A damaged page raises ``StoreCorrupt`` or
        kills this process."""
        size = self._file.stat().st_size
        with self.read() as txn:
            for table in self._names:
                for key in txn.keys(table):
                    if (value := txn.view(table, key)) is None:
                        raise StoreCorrupt(f"{self._file} is damaged: record {key.hex()} of table {table} is not found")
                    if 0 < value.nbytes <= size:
                        bytes(value[:1])
                        bytes(value[-1:])
        sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._env.copyfd(sink, compact=True)
        except lmdb.Error as error:
            raise StoreCorrupt(f"{self._file} is damaged: {error}") from error
        finally:
            os.close(sink)

    def sync(self) -> None:
        """Flush committed data to disk."""
        self._env.sync(True)

    def close(self) -> None:
        """Sync and close; idempotent."""
        if self._owner < 0:
            return
        with suppress(lmdb.Error):  # a disk that takes no writes; every commit that must be durable was synced
            self._env.sync(True)
        self._env.close()
        os.close(self._owner)
        self._owner = -1
