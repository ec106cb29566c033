"""A store in memory: transactions like those of ``lmdb``, without a file or a size limit.

One block at a time, as one thread has it: a ``read()`` block must end before the next ``write()``.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from staleflow.store.base import Buffer

Tables = dict[str, dict[bytes, bytes]]
Undo = list[tuple[str, bytes, bytes | None]]


class MemoryWrite:
    """A view of the tables and, inside a ``write()`` block, a transaction; ``undo`` collects the old values."""

    def __init__(self, tables: Tables, undo: Undo) -> None:
        self._tables = tables
        self._undo = undo

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._tables[table].get(key)

    def size(self, table: str, key: bytes) -> int | None:
        value = self._tables[table].get(key)
        return None if value is None else len(value)

    def items(self, table: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        rows = self._tables[table]
        for key in self.keys(table, start):
            yield key, rows[key]

    def keys(self, table: str, start: bytes = b"") -> Iterator[bytes]:
        return iter(sorted(key for key in self._tables[table] if key >= start))

    def count(self, table: str) -> int:
        return len(self._tables[table])

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        rows = self._tables[table]
        self._undo.append((table, key, rows.get(key)))
        rows[key] = bytes(value)

    def delete(self, table: str, key: bytes) -> bool:
        before = self._tables[table].pop(key, None)
        if before is None:
            return False
        self._undo.append((table, key, before))
        return True


class MemoryStore:
    """The tables ``tables``, initially empty."""

    def __init__(self, tables: Sequence[str]) -> None:
        self._tables: Tables = {name: {} for name in tables}

    @contextmanager
    def read(self) -> Generator[MemoryWrite]:
        """Open a view of the last commit."""
        yield MemoryWrite(self._tables, [])

    @contextmanager
    def write(self) -> Generator[MemoryWrite]:
        """Open a transaction, committed when the block ends; if the block raises, nothing of it is kept."""
        undo: Undo = []
        try:
            yield MemoryWrite(self._tables, undo)
        except BaseException:
            for table, key, before in reversed(undo):
                if before is None:
                    self._tables[table].pop(key, None)
                else:
                    self._tables[table][key] = before
            raise

    def used_share(self) -> float:
        """Return 0: room is unlimited."""
        return 0.0

    def close(self) -> None:
        """Do nothing: no resource is held."""
