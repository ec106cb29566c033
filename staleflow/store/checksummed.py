"""A store that believes none of its values without its checksum: each carries the CRC-32 of its key and itself.

For a store whose every record is needed, such as the ledger's: a record that changed on disk is ``StoreCorrupt``, which
names table and key, and whoever asked for it stops. Whoever can do without one record checks it himself.
"""

import struct
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from staleflow.store.base import Buffer, Read, Store, StoreCorrupt, Write

_CRC = struct.Struct("<I")


class CheckedRead:
    """A view whose values are what was written."""

    def __init__(self, inner: Read, path: Path) -> None:
        self._inner = inner
        self._path = path

    def get(self, table: str, key: bytes) -> bytes | None:
        """The value; None when there is none."""
        value = self._inner.get(table, key)
        return None if value is None else self._opened(table, key, value)

    def size(self, table: str, key: bytes) -> int | None:
        """Bytes of the value, which are not looked at; None when there is none."""
        size = self._inner.size(table, key)
        return None if size is None else size - _CRC.size

    def items(self, table: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """(key, value) in order of key, from ``start`` on."""
        for key, value in self._inner.items(table, start):
            yield key, self._opened(table, key, value)

    def keys(self, table: str, start: bytes = b"") -> Iterator[bytes]:
        """Keys in order, from ``start`` on; each is that of a value as it was written."""
        for key, _ in self.items(table, start):
            yield key

    def count(self, table: str) -> int:
        """How many records the table has."""
        return self._inner.count(table)

    def _opened(self, table: str, key: bytes, value: bytes) -> bytes:
        cut = len(value) - _CRC.size
        if cut < 0 or value[cut:] != _CRC.pack(zlib.crc32(value[:cut], zlib.crc32(key))):
            raise StoreCorrupt(f"{self._path} is damaged: record {key.hex()} of table {table} is not what was written")
        return value[:cut]


class CheckedWrite(CheckedRead):
    """A transaction of such a store."""

    def __init__(self, inner: Write, path: Path) -> None:
        super().__init__(inner, path)
        self._to = inner

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """Set ``key``, whatever it was."""
        self._to.put(table, key, bytes(value) + _CRC.pack(zlib.crc32(value, zlib.crc32(key))))

    def delete(self, table: str, key: bytes) -> bool:
        """Forget ``key``; says whether it was there."""
        return self._to.delete(table, key)


class CheckedStore:
    """``inner`` with a checksum on every value. ``path`` is what a damaged record is said to be in."""

    def __init__(self, inner: Store, path: Path) -> None:
        self._inner = inner
        self._path = path

    @contextmanager
    def read(self) -> Generator[CheckedRead]:
        """A view of what was committed last."""
        with self._inner.read() as txn:
            yield CheckedRead(txn, self._path)

    @contextmanager
    def write(self) -> Generator[CheckedWrite]:
        """One transaction, committed when the block ends. ``StoreError`` when it cannot be; then nothing was kept."""
        with self._inner.write() as txn:
            yield CheckedWrite(txn, self._path)

    def used_share(self) -> float:
        """Share of the room that live records take, 0 to 1."""
        return self._inner.used_share()

    def close(self) -> None:
        """Let go of it; what was committed stays. May be called again."""
        self._inner.close()
