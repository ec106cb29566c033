"""The interface of a store: ordered tables, changed by whole transactions. Implemented by ``lmdb`` (on disk) and
``memory``.

Everything written inside one ``write()`` block becomes visible together when the block ends, or not at all when it
raises. A ``read()`` block sees the data committed before it started.
"""

import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from staleflow.store.disk_errors import Resource, State

Buffer = bytes | bytearray | memoryview
Durability = Literal["process", "power"]

FULL_SHARE = 0.9
"""Share of the map beyond which a server refuses new work; the rest is reserved for requests that finish work."""

_NUMBER = struct.Struct(">Q")


class StoreError(Exception):
    """Base of the store's errors. Nothing of the failed block was kept."""


class StoreFull(StoreError):
    """The map has no room, or the disk takes no writes."""

    resource: Resource = "map"


class DiskFull(StoreFull):
    """The disk takes no writes at present. It may take some again without anything being deleted here."""

    def __init__(self, message: str, state: State = "disk") -> None:
        super().__init__(message)
        self.resource: Resource = state


class StoreInUse(StoreError):
    """Another live process owns the store."""


class StoreCorrupt(StoreError):
    """Bytes of the file differ from those written; the message names the file. Nothing of it is served any more."""


def number_key(number: int) -> bytes:
    """Return a key of 8 bytes that sorts like its number; 0 <= number < 2**64."""
    return _NUMBER.pack(number)


def key_number(key: bytes) -> int:
    """Return the number of a key made by ``number_key``."""
    return int(_NUMBER.unpack(key)[0])


class Read(Protocol):
    """A consistent view of all tables, until its block ends."""

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value, or None if there is none."""
        ...

    def size(self, table: str, key: bytes) -> int | None:
        """Return the size of the value in bytes without reading it, or None if there is none."""
        ...

    def items(self, table: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) in order of key, from ``start`` on."""
        ...

    def keys(self, table: str, start: bytes = b"") -> Iterator[bytes]:
        """Yield the keys in order, from ``start`` on."""
        ...

    def count(self, table: str) -> int:
        """Return the number of records of the table."""
        ...


class Write(Read, Protocol):
    """One transaction: kept as a whole when its block ends, discarded when the block raises."""

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """Set ``key``, overwriting any old value."""
        ...

    def delete(self, table: str, key: bytes) -> bool:
        """Delete ``key``; return whether it existed."""
        ...


class Store(Protocol):
    """A set of tables."""

    def read(self) -> AbstractContextManager[Read]:
        """Open a view of the last commit."""
        ...

    def write(self) -> AbstractContextManager[Write]:
        """Open a transaction, committed when the block ends. Raises ``StoreError`` if the commit fails; then nothing
        was kept."""
        ...

    def used_share(self) -> float:
        """Return the share of the room that live records take, 0 to 1."""
        ...

    def close(self) -> None:
        """Close the store; committed data stays. Idempotent."""
        ...
