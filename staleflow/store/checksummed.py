"""A store that verifies a checksum on every read: each value carries the CRC-32 of its key and itself.

For stores that need every record, such as the ledger's: a record that changed on disk raises ``StoreCorrupt`` with
table and key, and the reader stops. Owners that can do without a single record check their records themselves.
"""

import struct
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from staleflow.store.base import Buffer, Read, Store, StoreCorrupt, Write

_CRC = struct.Struct("<I")


class CheckedRead:
    """A view that returns only values that match their checksum."""

    def __init__(self, inner: Read, path: Path) -> None:
        self._inner = inner
        self._path = path

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value, or None if there is none."""
        value = self._inner.get(table, key)
        return None if value is None else self._verified(table, key, value)

    def size(self, table: str, key: bytes) -> int | None:
        """Return the size of the value in bytes without reading it, or None if there is none."""
        size = self._inner.size(table, key)
        return None if size is None else size - _CRC.size

    def items(self, table: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) in order of key, from ``start`` on."""
        for key, value in self._inner.items(table, start):
            yield key, self._verified(table, key, value)

    def keys(self, table: str, start: bytes = b"") -> Iterator[bytes]:
        """Yield the keys in order, from ``start`` on, each after verifying its value."""
        for key, _ in self.items(table, start):
            yield key

    def count(self, table: str) -> int:
        """Return the number of records of the table."""
        return self._inner.count(table)

    def _verified(self, table: str, key: bytes, value: bytes) -> bytes:
        cut = len(value) - _CRC.size
        if cut < 0 or value[cut:] != _CRC.pack(zlib.crc32(value[:cut], zlib.crc32(key))):
            raise StoreCorrupt(f"{self._path} is damaged: record {key.hex()} of table {table} is not what was written")
        return value[:cut]


class CheckedWrite(CheckedRead):
    """A transaction of a checksummed store."""

    def __init__(self, inner: Write, path: Path) -> None:
        super().__init__(inner, path)
        self._to = inner

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """Set ``key``, overwriting any old value."""
        self._to.put(table, key, bytes(value) + _CRC.pack(zlib.crc32(value, zlib.crc32(key))))

    def delete(self, table: str, key: bytes) -> bool:
        """Delete ``key``; return whether it existed."""
        return self._to.delete(table, key)


class CheckedStore:
    """``inner`` with a checksum on every value. Errors name ``path`` as the damaged file."""

    def __init__(self, inner: Store, path: Path) -> None:
        self._inner = inner
        self._path = path

    @contextmanager
    def read(self) -> Generator[CheckedRead]:
        """Open a view of the last commit."""
        with self._inner.read() as txn:
            yield CheckedRead(txn, self._path)

    @contextmanager
    def write(self) -> Generator[CheckedWrite]:
        """Open a transaction, committed when the block ends. Raises ``StoreError`` if the commit fails; then nothing
        was kept."""
        with self._inner.write() as txn:
            yield CheckedWrite(txn, self._path)

    def used_share(self) -> float:
        """Return the share of the room that live records take, 0 to 1."""
        return self._inner.used_share()

    def close(self) -> None:
        """Close the store; committed data stays. Idempotent."""
        self._inner.close()
