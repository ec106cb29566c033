"""Writer of ``trace.jsonl``: the ledger's transitions, one per line, hash-chained so that edits are detected.

- A line is committed to the store together with its state change. The file follows: it may lag the store but never lead
  it. A chunk of lines stays in the store's ``outbox`` until it is known to be in the file.
- ``seq`` counts from 1 without a gap, and the chain continues, across incarnations.
- Opening cuts a torn tail off the file and appends the committed lines that it lacks; on a full disk they follow with a
  later commit. Whole lines beyond the store mean that the store is lost or an older copy: they are never cut.
"""

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from staleflow.configs.durable_files import replace_durably, sync_path
from staleflow.process.clock import WALL, Clock
from staleflow.store.base import Durability, Read, Store, Write, key_number, number_key
from staleflow.store.disk_errors import state_of
from staleflow.trace.events import SCHEMA, TraceEvent
from staleflow.trace.highlights import Recent, brief
from staleflow.trace.reader import typed

NO_HASH = "0" * 16
TABLES = ("trace", "outbox")
"""Tables of the store that a trace uses."""

RESTORE = (
    "nothing was changed: restore the newest copy of the part that is missing or older, or start a new run in another "
    "directory (model.path=RUN_DIR/checkpoints/N continues from its weights)"
)
"""Advice for a run directory whose parts do not belong together."""

_HEAD = b"head"
_ENDING = f',"h":"{NO_HASH}"}}\n'
_ENDS = re.compile(rb',"h":"([0-9a-f]{16})"\}\n')
_READ_BYTES = 1 << 20
_SYNC_INTERVAL_NS = 1_000_000_000


class TraceError(Exception):
    """The file lacks lines that the store no longer has, has lines that the store never had, or belongs to another
    store."""


class Head(msgspec.Struct, frozen=True):
    """The end of the committed trace."""

    seq: int = 0
    h: str = NO_HASH
    end: int = 0
    """Bytes of the file up to and including line ``seq``."""


_encode = msgspec.json.Encoder().encode


def lines(head: Head, prefix: bytes, events: list[tuple[TraceEvent, int, int]]) -> tuple[Head, bytes]:
    """Return the new head and the lines of ``events`` (event, unix ns, monotonic ns) that follow ``head``."""
    seq, previous, out = head.seq, head.h.encode(), list[bytes]()
    for event, unix_ns, mono_ns in events:
        seq += 1
        line = b'%b%d,"t":%d,"m":%d,%b' % (prefix, seq, unix_ns, mono_ns, _encode(event)[1:-1])
        previous = hashlib.sha256(previous + line).hexdigest()[:16].encode()
        out.append(b'%b,"h":"%b"}\n' % (line, previous))
    chunk = b"".join(out)
    return Head(seq, previous.decode(), head.end + len(chunk)), chunk


class Trace:
    """The trace of one incarnation. ``add`` buffers lines until the next ``commit``.

    A group commit is ``with store.write() as txn: ...; trace.commit(txn)`` followed by ``trace.committed()``, or by
    ``trace.forget()`` if the transaction failed.
    """

    def __init__(
        self, path: Path, store: Store, *, run: str, incarnation: int, durability: Durability, clock: Clock = WALL
    ) -> None:
        self.path = path
        self._clock = clock
        self._power = durability == "power"
        self._prefix = b'{"schema":%d,"run":%b,"inc":%d,"seq":' % (SCHEMA, _encode(run), incarnation)
        self._events: list[tuple[TraceEvent, int, int]] = []
        self._ended = False
        self.recent = Recent()
        """Committed noteworthy lines of this incarnation, in brief."""
        with store.read() as txn:
            self._head = self._next = stored_head(txn)
            self._file, self._written, self._unwritten = _recover(path, txn, self._head, run)
        # the outbox is trimmed of lines in the file, so the file's folder entry must survive a power failure
        if self._power:
            sync_path(path.parent)
        self._trimmed = 0
        self._synced_ns = self._clock.now_ns()

    @property
    def seq(self) -> int:
        """Number of the last committed line."""
        return self._head.seq

    @property
    def waiting(self) -> bool:
        """True if any line waits for a commit."""
        return bool(self._events)

    def add(self, event: TraceEvent) -> None:
        """Append a line with the next commit; no effect after ``end``."""
        if not self._ended:
            self._events.append((event, self._clock.unix_ns(), self._clock.now_ns()))

    def end(self) -> None:
        """Accept no further lines in this incarnation."""
        self._ended = True

    def commit(self, txn: Write) -> None:
        """Put the waiting lines into ``txn``, and delete the chunks that have reached the file from its outbox."""
        self._next, chunk = lines(self._head, self._prefix, self._events)
        if chunk:
            # Keyed by file offset, so that a restart can write each chunk to its place, however often.
            txn.put("outbox", number_key(self._head.end), chunk)
            txn.put("trace", _HEAD, msgspec.msgpack.encode(self._next))
            self._unwritten.append((self._head.end, chunk))
        self._trim(txn)

    def _trim(self, txn: Write) -> None:
        """Delete the chunks that the file has from the outbox; with ``durability = "power"`` only after a sync of the
        file."""
        self._trimmed = 0
        if self._power:
            if self._clock.now_ns() - self._synced_ns < _SYNC_INTERVAL_NS:
                return
            self._synced_ns = self._clock.now_ns()
            if not self._sync(txn):
                return
        for offset in self._written:
            txn.delete("outbox", number_key(offset))
        self._trimmed = len(self._written)

    def _sync(self, txn: Read) -> bool:
        """Return whether the file's lines have reached the disk. After a failed sync the system may have dropped dirty
        pages, so the lines are written again and stay in the outbox until a sync succeeds."""
        try:
            os.fdatasync(self._file)
        except OSError:
            with suppress(OSError):
                for offset in self._written:
                    _write_at(self._file, offset, txn.get("outbox", number_key(offset)) or b"")
            return False
        return True

    def committed(self) -> None:
        """Write the lines of a durable transaction to the file. After an ``OSError`` they follow with the next
        commit."""
        self._head = self._next
        for event, unix_ns, _ in self._events:
            if (line := brief(event, unix_ns)) is not None:
                self.recent.add(line)
        self._events.clear()
        del self._written[: self._trimmed]
        self._trimmed = 0
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            offset, chunk = self._unwritten[0]
            _write_at(self._file, offset, chunk)
            self._written.append(offset)
            del self._unwritten[0]

    def forget(self) -> None:
        """Discard the lines of a failed transaction."""
        self._events.clear()
        self._trimmed = 0
        self._next = self._head
        self._unwritten = [(offset, chunk) for offset, chunk in self._unwritten if offset < self._head.end]

    def restore(self) -> bool:
        """Recreate a deleted file from the open descriptor; return whether that was necessary. Raises ``OSError``.

        A file that another process has put in its place is left alone; the next start compares it with the ledger.
        """
        if self.path.exists() or self._file < 0:
            return False
        beside = self.path.with_name(f".{self.path.name}.restored")
        file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            offset = 0
            while piece := os.pread(self._file, _READ_BYTES, offset):
                _write_at(file, offset, piece)
                offset += len(piece)
            replace_durably(beside, self.path)
        except BaseException:
            os.close(file)
            raise
        os.close(self._file)
        self._file = file
        return True

    def close(self) -> None:
        """Close the file. Lines that a full disk rejects now stay in the store; the next start writes them."""
        if self._file >= 0:
            with suppress(OSError):
                self._write()
            os.close(self._file)
            self._file = -1


def stored_head(txn: Read) -> Head:
    """Return the end of the committed trace."""
    raw = txn.get("trace", _HEAD)
    return Head() if raw is None else msgspec.msgpack.decode(raw, type=Head)


def _write_at(file: int, offset: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        written = os.pwrite(file, view, offset)
        offset, view = offset + written, view[written:]


def _recover(path: Path, txn: Read, head: Head, run: str) -> tuple[int, list[int], list[tuple[int, bytes]]]:
    """Open the file and make it equal to the committed trace. Return the descriptor, the offsets of the outbox chunks
    that the file has, and the chunks that it lacks because the disk is full.

    All checks precede the first write: a ledger that is older than the trace, or of another run, must not cost a line.
    Only a torn tail is cut.
    """
    outbox = [(key_number(key), chunk) for key, chunk in txn.items("outbox")]
    begin = outbox[0][0] if outbox else head.end
    if begin and not path.exists():
        raise TraceError(f"it is missing, and the ledger ends at its line {head.seq}; {RESTORE}")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _check_history(file, head, begin, b"".join(chunk for _, chunk in outbox), run)
        written, unwritten = list[int](), list[tuple[int, bytes]]()
        for offset, chunk in outbox:
            if not unwritten and _takes(file, offset, chunk):
                written.append(offset)
            else:
                unwritten.append((offset, chunk))
        if os.fstat(file).st_size > head.end:
            os.ftruncate(file, head.end)
        return file, written, unwritten
    except BaseException:
        os.close(file)
        raise


def _check_history(file: int, head: Head, begin: int, outbox: bytes, run: str) -> None:
    """Raise ``TraceError`` unless the file is the committed trace, apart from a torn tail. ``outbox`` has its lines
    from byte ``begin`` on."""
    size = os.fstat(file).st_size
    if size < begin:
        raise TraceError(f"it has lost lines: {size} bytes are left of {head.end}; {RESTORE}")
    _check_run(file, head, run)
    if begin and not _chains(_hash_before(file, begin), outbox, head):
        raise TraceError(f"it is not the trace of this ledger, whose line {head.seq} has hash {head.h}; {RESTORE}")
    _check_outbox(file, begin, outbox)
    if lines := _whole_lines(file, head.end, size):
        raise TraceError(
            f"it has {lines} lines beyond line {head.seq}, where the ledger ends: scheduler/data.mdb is an older copy; "
            f"{RESTORE}"
        )


def _check_run(file: int, head: Head, run: str) -> None:
    """Raise ``TraceError`` if the first line names another run."""
    try:
        first = typed(os.pread(file, _READ_BYTES, 0).partition(b"\n")[0])
    except msgspec.DecodeError:  # a torn line
        return
    if first.run != run:
        ledger = f"is of run {run}" if head.seq else "is missing or empty"
        lines = _whole_lines(file, 0, os.fstat(file).st_size)
        raise TraceError(f"it has {lines} lines of run {first.run}, but scheduler/data.mdb {ledger}; {RESTORE}")


def _check_outbox(file: int, begin: int, outbox: bytes) -> None:
    """Raise ``TraceError`` if the file continues with another line than the outbox: one that is whole and chained to
    the line before. Anything else in its place is a torn write."""
    written = os.pread(file, len(outbox), begin)
    if outbox.startswith(written):
        return
    same = next(index for index, (ours, theirs) in enumerate(zip(outbox, written, strict=False)) if ours != theirs)
    start = outbox.rfind(b"\n", 0, same) + 1
    line, end, _ = written[start:].partition(b"\n")
    before = _hash_of(outbox[:start]) if start else _hash_before(file, begin)
    if end and before and _hash_of(line + end) == _next_hash(before, line):
        raise TraceError(f"it continues with another history from byte {begin + start} on; {RESTORE}")


def _chains(before: str, outbox: bytes, head: Head) -> bool:
    """Return whether the store's part of the trace continues a file whose last line has the hash ``before``."""
    if not outbox:
        return before == head.h
    line, _, _ = outbox.partition(b"\n")
    return bool(before) and _hash_of(line + b"\n") == _next_hash(before, line)


def _hash_before(file: int, end: int) -> str:
    """Return the hash of the line that ends at byte ``end``; empty if no line does."""
    if not end:
        return NO_HASH
    size = min(end, len(_ENDING))
    return _hash_of(os.pread(file, size, end - size))


def _hash_of(lines: bytes) -> str:
    """Return the hash of the last of ``lines``; empty if they do not end with one."""
    match = _ENDS.match(lines[-len(_ENDING) :])
    return match[1].decode() if match else ""


def _next_hash(before: str, line: bytes) -> str:
    body, _, _ = line.rpartition(b',"h":"')
    return hashlib.sha256(before.encode() + body).hexdigest()[:16]


def _whole_lines(file: int, start: int, end: int) -> int:
    """Return the number of line ends in a part of the file."""
    lines = 0
    while start < end and (piece := os.pread(file, _READ_BYTES, start)):
        lines += piece.count(b"\n")
        start += len(piece)
    return lines


def _takes(file: int, offset: int, chunk: bytes) -> bool:
    """Write a chunk; return False if the disk takes no writes now."""
    try:
        _write_at(file, offset, chunk)
    except OSError as error:
        if state_of(error) is None:
            raise
        return False
    return True
