"""The payloads of one shard on disk: written once, never changed, each with its sha256.

``payloads`` holds the packed arrays, ``records`` what is known of each, ``columns`` what the stages made of it. Bytes
that are not what their sha256 says are never returned: ``CorruptRecord`` names them. What is signed is signed with its
key, so that nothing stands for something else; a record without its payload, or the other way round, is damaged.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.tensors import Array, pack, unpack
from staleflow.runtime.store import Read, Store, StoreCorrupt, StoreFull, Write, key_number, number_key
from staleflow.servers.trajectories.records import Key, Pushed, Record

TABLES = ("records", "payloads", "columns", "turns")
_SHA_BYTES = 32
_KEY_BYTES = 16
_END = (b"\xff" * (_KEY_BYTES + 1), b"")
"""After the last entry of a table."""
_records = msgspec.msgpack.Decoder(Record)


class CorruptRecord(Exception):
    """Stored bytes are not what was stored."""

    def __init__(self, key: Key, what: str) -> None:
        super().__init__(f"{what} of group {key.group}, lease {key.lease}, is not what its sha256 says")
        self.key = key


class Columns(NamedTuple):
    """What a stage made of one group."""

    key: Key
    stage: str
    arrays: dict[str, Array]
    """By full name."""


class Loaded(NamedTuple):
    """One payload found at the start."""

    key: Key
    record: Record | None
    """None when it or a stage column of it is damaged."""
    columns: dict[str, bytes]
    """Packed columns of each stage that is done."""


class TrajectoryStore:
    """Owned by one process. Writes raise ``StoreFull`` or ``StoreError`` and then have changed nothing."""

    def __init__(self, store: Store, *, map_bytes: int) -> None:
        self._store = store
        self.map_bytes = map_bytes
        self._turns = 0

    def write_pushes(self, pushes: Sequence[Pushed]) -> None:
        """Make payloads durable, all or none. None of them is stored already."""
        with self._store.write() as txn:
            for key, record, blob in pushes:
                txn.put("payloads", _raw(key), blob)
                txn.put("records", _raw(key), _signed(_raw(key), msgspec.msgpack.encode(record)))

    def write_columns(self, columns: Sequence[Columns]) -> None:
        """Make what stages made durable, all or nothing."""
        with self._store.write() as txn:
            for key, stage, arrays in columns:
                raw = _raw(key) + stage.encode()
                txn.put("columns", raw, _signed(raw, pack(arrays)))

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget payloads and all that belongs to them."""
        with self._store.write() as txn:
            for key in keys:
                txn.delete("payloads", _raw(key))
                txn.delete("records", _raw(key))
                for raw in list(_prefixed(txn, _raw(key))):
                    txn.delete("columns", raw)

    def turn_over(self) -> None:
        """Commit next to nothing: LMDB gives the pages that a commit has freed back only one commit later."""
        self._turns += 1
        with suppress(StoreFull), self._store.write() as txn:
            txn.put("turns", b"last", number_key(self._turns))

    def load(self) -> Iterator[Loaded]:
        """Everything that is stored, payloads aside; in one pass over tables of the same order. ``StoreCorrupt``."""
        with self._store.read() as txn:
            payloads = dict.fromkeys(txn.keys("payloads"))
            columns = txn.items("columns")
            next_raw, next_value = next(columns, _END)
            for raw, value in txn.items("records"):
                packed, found = _opened(raw, value), dict[str, bytes]()
                while next_raw[:_KEY_BYTES] <= raw:
                    if next_raw[:_KEY_BYTES] == raw:
                        column = _opened(next_raw, next_value)
                        packed = None if column is None else packed
                        found[next_raw[_KEY_BYTES:].decode("utf-8", "replace")] = column or b""
                    next_raw, next_value = next(columns, _END)
                if raw in payloads:
                    del payloads[raw]
                else:
                    packed = None
                yield Loaded(_key(raw), None if packed is None else _records.decode(packed), found)
            for _ in columns:  # to the end: whoever walks a whole table knows that it is whole
                pass
            for raw in payloads:
                yield Loaded(_key(raw), None, {})

    def payload(self, key: Key, record: Record) -> bytes:
        """The packed arrays, not checked but for their number of bytes: that is slow, and ``unpacked`` does it."""
        with self._store.read() as txn:
            size = txn.size("payloads", _raw(key))
            blob = txn.get("payloads", _raw(key)) if size == record.nbytes else None
        if blob is None:
            raise CorruptRecord(key, "the payload" if size is not None else "the payload (which is missing)")
        return blob

    def columns(self, key: Key, stages: Iterable[str]) -> dict[str, Array]:
        """What these stages made, by full name."""
        with self._store.read() as txn:
            found = _columns(txn, key)
        if missing := [stage for stage in stages if stage not in found]:
            raise CorruptRecord(key, f"a stage column, {', '.join(missing)} (which is missing),")
        return {name: array for part in found.values() for name, array in part.items()}

    def used_share(self) -> float:
        """Share of the map in use, 0 to 1."""
        return self._store.used_share()

    def close(self) -> None:
        """Sync and let go."""
        self._store.close()


def unpacked(key: Key, record: Record, blob: bytes) -> dict[str, Array]:
    """The arrays of a payload; ``CorruptRecord`` unless they are what was pushed."""
    if hashlib.sha256(blob).hexdigest() != record.sha:
        raise CorruptRecord(key, "the payload")
    return unpack(blob)


def _columns(txn: Read, key: Key) -> dict[str, dict[str, Array]]:
    """By stage."""
    found: dict[str, dict[str, Array]] = {}
    for raw in list(_prefixed(txn, _raw(key))):
        value = txn.get("columns", raw) or b""
        try:
            found[raw[_KEY_BYTES:].decode()] = unpack(_checked(key, "a stage column", raw, value))
        except (ProtocolError, UnicodeDecodeError) as error:
            raise CorruptRecord(key, "a stage column") from error
    return found


def _prefixed(txn: Read | Write, prefix: bytes) -> Iterator[bytes]:
    for raw in txn.keys("columns", prefix):
        if not raw.startswith(prefix):
            return
        yield raw


def _raw(key: Key) -> bytes:
    return number_key(key.group) + number_key(key.lease)


def _key(raw: bytes) -> Key:
    if len(raw) != _KEY_BYTES:
        raise StoreCorrupt(f"the trajectory store is damaged: a key has {len(raw)} bytes")
    return Key(GroupId(key_number(raw[:8])), LeaseId(key_number(raw[8:16])))


def _signed(raw: bytes, value: bytes) -> bytes:
    return hashlib.sha256(raw + value).digest() + value


def _opened(raw: bytes, value: bytes) -> bytes | None:
    """What was signed under this key; None when either has changed since."""
    digest, rest = value[:_SHA_BYTES], value[_SHA_BYTES:]
    return rest if hashlib.sha256(raw + rest).digest() == digest else None


def _checked(key: Key, what: str, raw: bytes, value: bytes) -> bytes:
    if (rest := _opened(raw, value)) is None:
        raise CorruptRecord(key, what)
    return rest
