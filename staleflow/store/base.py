"""What a store is: ordered tables, changed by whole transactions. On disk in ``lmdb_store``, else ``memory_store``.

Everything written inside one ``write()`` block becomes visible together when the block ends, or not at all when it
raises. A ``read()`` block sees what was committed before it began.
"""

import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from staleflow.store.disk_errors import Resource, State

Buffer = bytes | bytearray | memoryview
Durability = Literal["process", "power"]

FULL_SHARE = 0.9
"""Share of the map beyond which a server refuses new work; the rest is for what ends work."""

_NUMBER = struct.Struct(">Q")


class StoreError(Exception):
    """Base: what this store could not do. Nothing of the failed block was kept."""


class StoreFull(StoreError):
    """The map has no room, or the disk takes no writes."""

    resource: Resource = "map"


class DiskFull(StoreFull):
    """It is the disk, which takes no writes at present. It may take some again without anything being deleted here."""

    def __init__(self, message: str, state: State = "disk") -> None:
        super().__init__(message)
        self.resource: Resource = state


class StoreInUse(StoreError):
    """Another live process owns the store."""


class StoreCorrupt(StoreError):
    """Bytes of the file are not what was written; the message names it. Nothing is served of it any more."""


def number_key(number: int) -> bytes:
    """A key of 8 bytes whose order is that of the numbers; 0 <= number < 2**64."""
    return _NUMBER.pack(number)


def key_number(key: bytes) -> int:
    """The number of ``number_key``."""
    return int(_NUMBER.unpack(key)[0])


class Read(Protocol):
    """A consistent view of all tables, until its block ends."""

    def get(self, table: str, key: bytes) -> bytes | None:
        """The value; None when there is none."""
        ...

    def size(self, table: str, key: bytes) -> int | None:
        """Bytes of the value, which are not looked at; None when there is none."""
        ...

    def items(self, table: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """(key, value) in order of key, from ``start`` on."""
        ...

    def keys(self, table: str, start: bytes = b"") -> Iterator[bytes]:
        """Keys in order, from ``start`` on."""
        ...

    def count(self, table: str) -> int:
        """How many records the table has."""
        ...


class Write(Read, Protocol):
    """One transaction: kept as a whole when its block ends, forgotten when the block raises."""

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """Set ``key``, whatever it was."""
        ...

    def delete(self, table: str, key: bytes) -> bool:
        """Forget ``key``; says whether it was there."""
        ...


class Store(Protocol):
    """The tables themselves."""

    def read(self) -> AbstractContextManager[Read]:
        """A view of what was committed last."""
        ...

    def write(self) -> AbstractContextManager[Write]:
        """One transaction, committed when the block ends. ``StoreError`` when it cannot be; then nothing was kept."""
        ...

    def used_share(self) -> float:
        """Share of the room that live records take, 0 to 1."""
        ...

    def close(self) -> None:
        """Let go of it; what was committed stays. May be called again."""
        ...
