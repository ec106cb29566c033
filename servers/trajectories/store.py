"""The payloads of one shard on disk: written once, never changed, each with its sha256.

``payloads`` holds the packed arrays, unless they lie in a slab; ``records`` what is known of each; ``columns`` what the
stages made of it. Bytes that are not what their sha256 says are never returned: ``CorruptRecord`` names them. What is
signed is signed with its key, so that nothing stands for something else; a record without its payload, or the other way
round, is damaged.
"""

import hashlib
from collections.abc import Collection, Container, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.protocols.wire.codec import ProtocolError
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
"""After the last key of a table."""
_REACHED = b"reached"
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
    """None when it or its reward is damaged."""
    columns: dict[str, bytes]
    """By stage that is done: packed columns of the reward, by which the filter judges. Others are empty: they are
    read and checked when somebody asks for them."""


class TrajectoryStore:
    """Owned by one process. Writes raise ``StoreFull`` or ``StoreError`` and then have changed nothing."""

    def __init__(self, store: Store, *, map_bytes: int, slabs: Slabs | None = None, sync: bool = False) -> None:
        """``sync``: slabs are brought to the disk before a record refers to them."""
        self._store = store
        self.slabs = slabs
        self._sync = sync
        self.map_bytes = map_bytes
        self._turns = 0
        with store.read() as txn:
            raw = txn.get("turns", _REACHED)
        self.reached = KnownState() if raw is None else msgspec.msgpack.decode(raw, type=KnownState)
        """Run and highest registered lease; stored with the next transaction."""
        self._noted = self.reached

    def reach(self, run: str, lease: LeaseId | None = None) -> None:
        """Note the run, and that the scheduler has registered a push of this lease."""
        highest = max(lease or self.reached.lease, self.reached.lease)
        if (run, highest) != (self.reached.run, self.reached.lease):
            self.reached = KnownState(run=run, lease=highest)

    @contextmanager
    def _write(self) -> Generator[Write]:
        """A transaction that takes the note along."""
        reached = self.reached
        with self._store.write() as txn:
            if reached != self._noted:
                txn.put("turns", _REACHED, msgspec.msgpack.encode(reached))
            yield txn
        self._noted = reached

    def write_pushes(self, pushes: Sequence[Pushed], instead_of: Container[Key] = ()) -> list[Record]:
        """Make payloads durable, all or none, and return what is stored of each. None of them is stored already, but
        for those in ``instead_of``, of which only what cannot be read is there: that goes in the same transaction."""
        try:
            records = [self._placed(one) for one in pushes]
            slabs = {record.slab: None for record in records if record.slab}
            if self._sync and slabs:
                self._of_slabs.sync(slabs)
            with self._write() as txn:
                for one, record in zip(pushes, records, strict=True):
                    raw = _raw(one.key)
                    if one.key in instead_of:
                        _delete(txn, [raw])
                    if not record.slab:
                        txn.put("payloads", raw, one.blob)
                    txn.put("records", raw, _signed(raw, msgspec.msgpack.encode(record)))
        except BaseException as error:
            if self.slabs is not None:
                self.slabs.free(one.key for one in pushes)
            if isinstance(error, OSError):
                state = "disk" if error.errno in SCARCE else state_of(error)  # of these, another try may find some
                if state is not None:
                    raise DiskFull(f"slabs cannot be written: {error}", state) from error
                raise StoreError(f"slabs cannot be written: {error}") from error
            raise
        return records

    def _placed(self, one: Pushed) -> Record:
        """Its record, with the place of its bytes in a slab if there is room in one."""
        record = one.record
        if self.slabs is None:
            return record
        if record.slab:
            self.slabs.hold(one.key, record.slab)
            return record
        place = self.slabs.store(one.key, one.parts, record.nbytes, self.slab_room)
        return record if place is None else msgspec.structs.replace(record, slab=place.slab, offset=place.offset)

    def slab_room(self) -> int:
        """Bytes that another slab may take."""
        return int((FULL_SHARE - self.used_share()) * self.map_bytes)

    @property
    def _of_slabs(self) -> Slabs:
        assert self.slabs is not None, "a record lies in a slab"
        return self.slabs

    def write_columns(self, columns: Sequence[Columns]) -> None:
        """Make what stages made durable, all or nothing."""
        with self._write() as txn:
            for one in columns:
                _put_columns(txn, one)

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget payloads and all that belongs to them."""
        with self._write() as txn:
            _delete(txn, map(_raw, keys))
        if self.slabs is not None:
            self.slabs.free(keys)

    def turn_over(self) -> None:
        """Commit next to nothing: LMDB gives the pages that a commit has freed back only one commit later."""
        self._turns += 1
        with suppress(StoreFull), self._write() as txn:
            txn.put("turns", b"last", number_key(self._turns))

    def load(self) -> Iterator[Loaded]:
        """Everything that is stored, but for payloads and what stages made beside the reward; in one pass over tables
        of the same order. ``StoreCorrupt``."""
        with self._store.read() as txn:
            payloads = dict.fromkeys(txn.keys("payloads"))
            columns = txn.keys("columns")
            next_raw = next(columns, _END)
            for raw, value in txn.items("records"):
                packed, found = _opened(raw, value), dict[str, bytes]()
                while next_raw[:_KEY_BYTES] <= raw:
                    if next_raw[:_KEY_BYTES] == raw:
                        stage = next_raw[_KEY_BYTES:].decode("utf-8", "replace")
                        column = _opened(next_raw, txn.get("columns", next_raw) or b"") if stage == REWARD else b""
                        packed = None if column is None else packed
                        found[stage] = column or b""
                    next_raw = next(columns, _END)
                record = None if packed is None else _records.decode(packed)
                if record is not None and record.slab:
                    there = self._in_slab(_key(raw), record)
                else:
                    there = raw in payloads
                    payloads.pop(raw, None)
                yield Loaded(_key(raw), record if there else None, found)
            for _ in columns:  # to the end: whoever walks a whole table knows that it is whole
                pass
            for raw in payloads:
                yield Loaded(_key(raw), None, {})
        if self.slabs is not None:
            self.slabs.clear()

    def _in_slab(self, key: Key, record: Record) -> bool:
        return self.slabs is not None and self.slabs.find(key, record.slab, record.offset, record.nbytes)

    def payload(self, key: Key, record: Record) -> bytes:
        """The packed arrays, not checked but for their number of bytes: that is slow, and ``unpacked`` does it."""
        if record.slab:
            return bytes(self._view(key, record))
        with self._store.read() as txn:
            size = txn.size("payloads", _raw(key))
            blob = txn.get("payloads", _raw(key)) if size == record.nbytes else None
        if blob is None:
            raise CorruptRecord(key, "the payload" if size is not None else "the payload (which is missing)")
        return blob

    def stored(self, key: Key, record: Record) -> memoryview:
        """The same without a copy where it lies in a slab: valid as long as the record is kept."""
        return self._view(key, record) if record.slab else memoryview(self.payload(key, record))

    def _view(self, key: Key, record: Record) -> memoryview:
        data = None if self.slabs is None else self.slabs.read(record.slab, record.offset, record.nbytes)
        if data is None:
            raise CorruptRecord(key, "the payload (whose slab is missing)")
        return data

    def columns(
        self, wanted: Iterable[tuple[Key, Record, Container[str]]], stages: Collection[str]
    ) -> list[dict[str, Array]]:
        """What any of ``stages`` made of each of these groups, by full name; those that come with a group must have.
        Rewards of an environment are in the record."""
        with self._store.read() as txn:
            return [_columns(txn, key, record, done, stages) for key, record, done in wanted]

    def used_share(self) -> float:
        """Share of the map in use, 0 to 1."""
        in_slabs = 0 if self.slabs is None else self.slabs.nbytes
        return min(self._store.used_share() + in_slabs / self.map_bytes, 1.0)

    def close(self) -> None:
        """Sync and let go."""
        if self.reached != self._noted:
            with suppress(StoreError), self._write():
                pass
        self._store.close()


def unpacked(key: Key, record: Record, blob: bytes) -> dict[str, Array]:
    """The arrays of a payload; ``CorruptRecord`` unless they are what was pushed, and a group.

    A worker may write into its slab between the look at a push and its sha256.
    """
    if hashlib.sha256(blob).hexdigest() != record.sha:
        raise CorruptRecord(key, "the payload")
    try:
        found = unpack(blob)
        GroupPayload.from_arrays(found)
    except ProtocolError as error:
        raise CorruptRecord(key, "the payload") from error
    return found


def _columns(txn: Read, key: Key, record: Record, done: Container[str], stages: Iterable[str]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for stage in stages:
        if stage == REWARD and (reward := record.reward) is not None:
            found[REWARD_COLUMN] = reward
            continue
        raw = _raw(key) + stage.encode()
        if (value := txn.get("columns", raw)) is None:
            if stage in done:
                raise CorruptRecord(key, f"a stage column, {stage} (which is missing),")
            continue
        try:
            found |= unpack(_checked(key, "a stage column", raw, value))
        except ProtocolError as error:
            raise CorruptRecord(key, "a stage column") from error
    return found


def _put_columns(txn: Write, columns: Columns) -> None:
    raw = _raw(columns.key) + columns.stage.encode()
    txn.put("columns", raw, _signed(raw, pack(columns.arrays)))


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
