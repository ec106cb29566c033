"""Payloads of one shard on disk: written once, never modified, each with its digest.

- ``payloads`` has the packed arrays, unless they lie in a slab; ``records`` the metadata; ``columns`` the results of
  stages.
- Bytes that do not match their digest are never returned: ``CorruptRecord`` is raised for them.
- Every value is hashed together with its key, so that no value can be mistaken for that of another key.
- A record without its payload, or a payload without its record, is damaged.
"""

import hashlib
from collections.abc import Collection, Container, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.payload_digest import matches
from staleflow.protocols.wire.stages import REWARD, REWARD_COLUMN
from staleflow.protocols.wire.tensors import Array, pack, unpack
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.servers.trajectories.records import Key, Pushed, Record
from staleflow.servers.trajectories.slabs import Slabs
from staleflow.store.base import (
    FULL_SHARE,
    DiskFull,
    Read,
    Store,
    StoreCorrupt,
    StoreError,
    StoreFull,
    Write,
    key_number,
    number_key,
)
from staleflow.store.disk_errors import state_of
from staleflow.store.shared_file import SCARCE
from staleflow.trace.run_history import KnownState

TABLES = ("records", "payloads", "columns", "turns")
_SHA_BYTES = 32
_KEY_BYTES = 16
_END = b"\xff" * (_KEY_BYTES + 1)
"""Sorts after every key of a table."""
_REACHED = b"reached"
_records = msgspec.msgpack.Decoder(Record)


class CorruptRecord(Exception):
    """Stored bytes do not match their digest, or are missing."""

    def __init__(self, key: Key, what: str) -> None:
        super().__init__(f"{what} of group {key.group}, lease {key.lease}, does not match its digest")
        self.key = key


class Columns(NamedTuple):
    """Columns that a stage computed for one group."""

    key: Key
    stage: str
    arrays: dict[str, Array]
    """Arrays by full column name."""


class Loaded(NamedTuple):
    """One payload loaded at the start."""

    key: Key
    record: Record | None
    """Record; None if it or its reward is damaged."""
    columns: dict[str, bytes]
    """Packed columns by finished stage.

    Only those of the reward are loaded, because the filter needs them. The others are empty here; they are read and
    checked on request.
    """


class TrajectoryStore:
    """Tables of one shard, owned by one process. A write that raises ``StoreFull`` or ``StoreError`` has changed
    nothing."""

    def __init__(self, store: Store, *, map_bytes: int, slabs: Slabs | None = None, sync: bool = False) -> None:
        """``sync``: write slabs to the disk before a record refers to them."""
        self._store = store
        self.slabs = slabs
        self._sync = sync
        self.map_bytes = map_bytes
        self._turns = 0
        with store.read() as txn:
            raw = txn.get("turns", _REACHED)
        self.reached = KnownState() if raw is None else msgspec.msgpack.decode(raw, type=KnownState)
        """Run and highest registered lease; stored with the next transaction."""
        self._stored_reached = self.reached

    def reach(self, run: str, lease: LeaseId | None = None) -> None:
        """Note the run and, if given, a lease whose push the scheduler has registered."""
        highest = max(lease or self.reached.lease, self.reached.lease)
        if (run, highest) != (self.reached.run, self.reached.lease):
            self.reached = KnownState(run=run, lease=highest)

    @contextmanager
    def _write(self) -> Generator[Write]:
        """Open a transaction that also stores ``reached`` if it has changed."""
        reached = self.reached
        with self._store.write() as txn:
            if reached != self._stored_reached:
                txn.put("turns", _REACHED, msgspec.msgpack.encode(reached))
            yield txn
        self._stored_reached = reached

    def write_pushes(self, pushes: Sequence[Pushed], instead_of: Container[Key] = ()) -> list[Record]:
        """Store payloads, all or none, and return their records.

        No key may be stored already, except keys in ``instead_of``: their damaged rows are deleted in the same
        transaction.
        """
        try:
            records = [self._placed(one) for one in pushes]
            slabs = {record.slab: None for record in records if record.slab}
            # Slabs first: a durable record must never refer to bytes that are not durable.
            if self._sync and slabs:
                self._of_slabs.sync(slabs)
            with self._write() as txn:
                for one, record in zip(pushes, records, strict=True):
                    raw = _raw(one.key)
                    if one.key in instead_of:
                        _delete(txn, [raw])
                    if not record.slab:
                        txn.put("payloads", raw, one.blob)
                    txn.put("records", raw, _hashed(raw, msgspec.msgpack.encode(record)))
        except BaseException as error:
            # Nothing was stored: give the places in slabs back.
            if self.slabs is not None:
                self.slabs.free(one.key for one in pushes)
            if isinstance(error, OSError):
                state = "disk" if error.errno in SCARCE else state_of(error)  # transient: a retry may succeed
                if state is not None:
                    raise DiskFull(f"slabs cannot be written: {error}", state) from error
                raise StoreError(f"slabs cannot be written: {error}") from error
            raise
        return records

    def _placed(self, one: Pushed) -> Record:
        """Return its record, placed in a slab if one has room."""
        record = one.record
        if self.slabs is None:
            return record
        if record.slab:
            self.slabs.hold(one.key, record.slab)
            return record
        place = self.slabs.store(one.key, one.blob, self.slab_room)
        return record if place is None else msgspec.structs.replace(record, slab=place.slab, offset=place.offset)

    def slab_room(self) -> int:
        """Return the number of bytes available for another slab."""
        return int((FULL_SHARE - self.used_share()) * self.map_bytes)

    @property
    def _of_slabs(self) -> Slabs:
        assert self.slabs is not None, "a record lies in a slab, but the store has none"
        return self.slabs

    def write_columns(self, columns: Sequence[Columns]) -> None:
        """Store stage columns, all or none."""
        with self._write() as txn:
            for one in columns:
                _put_columns(txn, one)

    def delete(self, keys: Sequence[Key]) -> None:
        """Delete payloads with their records and columns."""
        with self._write() as txn:
            _delete(txn, map(_raw, keys))
        if self.slabs is not None:
            self.slabs.free(keys)

    def turn_over(self) -> None:
        """Commit a tiny transaction: LMDB reuses the pages that a commit has freed only one commit later."""
        self._turns += 1
        with suppress(StoreFull), self._write() as txn:
            txn.put("turns", b"last", number_key(self._turns))

    def load(self) -> Iterator[Loaded]:
        """Yield all records with their reward columns, in one pass over tables of the same key order.

        Payloads and other columns are not read. Raise ``StoreCorrupt``.
        """
        with self._store.read() as txn:
            payloads = dict.fromkeys(txn.keys("payloads"))
            columns = txn.keys("columns")
            next_raw = next(columns, _END)
            for raw, value in txn.items("records"):
                packed, stages = _verified(raw, value), dict[str, bytes]()
                while next_raw[:_KEY_BYTES] <= raw:
                    if next_raw[:_KEY_BYTES] == raw:
                        stage = next_raw[_KEY_BYTES:].decode("utf-8", "replace")
                        column = _verified(next_raw, txn.get("columns", next_raw) or b"") if stage == REWARD else b""
                        packed = None if column is None else packed
                        stages[stage] = column or b""
                    next_raw = next(columns, _END)
                record = None if packed is None else _records.decode(packed)
                if record is not None and record.slab:
                    exists = self._in_slab(_key(raw), record)
                else:
                    exists = raw in payloads
                    payloads.pop(raw, None)
                yield Loaded(_key(raw), record if exists else None, stages)
            for _ in columns:  # walk to the end: that is how a truncated table is detected
                pass
            for raw in payloads:
                yield Loaded(_key(raw), None, {})
        if self.slabs is not None:
            self.slabs.clear()

    def _in_slab(self, key: Key, record: Record) -> bool:
        return self.slabs is not None and self.slabs.find(key, record.slab, record.offset, record.nbytes)

    def payload(self, key: Key, record: Record) -> bytes:
        """Return a copy of the packed arrays.

        Only their size is checked: hashing is slow, and ``unpack_verified`` does it.
        """
        if record.slab:
            return bytes(self._view(key, record))
        with self._store.read() as txn:
            size = txn.size("payloads", _raw(key))
            blob = txn.get("payloads", _raw(key)) if size == record.nbytes else None
        if blob is None:
            raise CorruptRecord(key, "the payload" if size is not None else "the payload (which is missing)")
        return blob

    def view_payload(self, key: Key, record: Record) -> memoryview:
        """Return the packed arrays, without a copy if they lie in a slab. Valid as long as the record is stored."""
        return self._view(key, record) if record.slab else memoryview(self.payload(key, record))

    def _view(self, key: Key, record: Record) -> memoryview:
        data = None if self.slabs is None else self.slabs.read(record.slab, record.offset, record.nbytes)
        if data is None:
            raise CorruptRecord(key, "the payload (its slab is missing)")
        return data

    def columns(
        self, wanted: Iterable[tuple[Key, Record, Container[str]]], stages: Collection[str]
    ) -> list[dict[str, Array]]:
        """Return the columns of each group by full name, from all of ``stages`` that have some.

        Raise ``CorruptRecord`` if a stage that is listed with its group has none. Rewards of an environment come from
        the record.
        """
        with self._store.read() as txn:
            return [_columns(txn, key, record, done, stages) for key, record, done in wanted]

    def used_share(self) -> float:
        """Return the share of the map in use, slabs included, 0 to 1."""
        in_slabs = 0 if self.slabs is None else self.slabs.nbytes
        return min(self._store.used_share() + in_slabs / self.map_bytes, 1.0)

    def close(self) -> None:
        """Store ``reached`` if it has changed, then sync and close."""
        if self.reached != self._stored_reached:
            with suppress(StoreError), self._write():
                pass
        self._store.close()


def unpack_verified(key: Key, record: Record, blob: bytes) -> dict[str, Array]:
    """Return the arrays of a payload. Raise ``CorruptRecord`` unless they are a valid group with the push's digest.

    Verifying at the push is not enough: a worker may write into its slab between the check of a push and its digest.
    """
    if not matches(blob, record.sha):
        raise CorruptRecord(key, "the payload")
    try:
        payload = unpack(blob)
        GroupPayload.from_arrays(payload)
    except ProtocolError as error:
        raise CorruptRecord(key, "the payload") from error
    return payload


def _columns(txn: Read, key: Key, record: Record, done: Container[str], stages: Iterable[str]) -> dict[str, Array]:
    columns: dict[str, Array] = {}
    for stage in stages:
        if stage == REWARD and (reward := record.reward) is not None:
            columns[REWARD_COLUMN] = reward
            continue
        raw = _raw(key) + stage.encode()
        if (value := txn.get("columns", raw)) is None:
            if stage in done:
                raise CorruptRecord(key, f"a stage column, {stage} (which is missing),")
            continue
        try:
            columns |= unpack(_checked(key, "a stage column", raw, value))
        except ProtocolError as error:
            raise CorruptRecord(key, "a stage column") from error
    return columns


def _put_columns(txn: Write, columns: Columns) -> None:
    raw = _raw(columns.key) + columns.stage.encode()
    txn.put("columns", raw, _hashed(raw, pack(columns.arrays)))


def _delete(txn: Write, raws: Iterable[bytes]) -> None:
    has_columns = txn.count("columns") > 0
    for raw in raws:
        txn.delete("payloads", raw)
        txn.delete("records", raw)
        for column in list(_prefixed(txn, raw)) if has_columns else ():
            txn.delete("columns", column)


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


def _hashed(raw: bytes, value: bytes) -> bytes:
    return hashlib.sha256(raw + value).digest() + value


def _verified(raw: bytes, value: bytes) -> bytes | None:
    """Return the value stored under this key; None if the key or the value has changed since."""
    digest, rest = value[:_SHA_BYTES], value[_SHA_BYTES:]
    return rest if hashlib.sha256(raw + rest).digest() == digest else None


def _checked(key: Key, what: str, raw: bytes, value: bytes) -> bytes:
    if (rest := _verified(raw, value)) is None:
        raise CorruptRecord(key, what)
    return rest
