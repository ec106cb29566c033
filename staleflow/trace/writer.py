"""``trace.jsonl``: what the ledger did, one line a transition, chained by hashes so that nobody edits it unseen.

- A line is committed to the store together with the state change it tells of; the file follows, and may lag the store
  but never lead it. Until a piece is known to be in the file it stays in the store's ``outbox``.
- ``seq`` counts from 1 without a gap, and the chain goes on, across incarnations.
- Opening cuts a torn tail off the file and appends what the store has and the file lacks; on a full disk that comes
  with a later commit. Whole lines beyond the store mean that the store is lost or an older copy: they are never cut.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.durable_files import replace_durably, sync_path
from staleflow.configs.errors import ConfigError
from staleflow.process.clock import WALL, Clock
from staleflow.store.base import Durability, Read, Store, Write, key_number, number_key
from staleflow.store.disk_errors import state_of
from staleflow.trace.events import SCHEMA, TraceEvent
from staleflow.trace.highlights import Recent, brief
from staleflow.trace.reader import complaint, decoded

NO_HASH = "0" * 16
TABLES = ("trace", "outbox")
"""Tables that a store needs for a trace."""

RESTORE = (
    "nothing was changed: restore the newest copy of the part that is missing or older, or start a new run in another "
    "directory (model.path=RUN_DIR/checkpoints/N continues from its weights)"
)
"""Advice for a run directory whose parts do not belong together."""

_HEAD = b"head"
_ENDING = f',"h":"{NO_HASH}"}}\n'
_ENDS = re.compile(rb',"h":"([0-9a-f]{16})"\}\n')
_PIECE = 1 << 20
_SYNC_NS = 1_000_000_000


class TraceError(Exception):
    """The file lacks lines that the store no longer has, has lines that the store never had, or is not the store's."""


class Head(msgspec.Struct, frozen=True):
    """The end of the committed trace."""

    seq: int = 0
    h: str = NO_HASH
    end: int = 0
    """Bytes of the file up to and including line ``seq``."""


_encode = msgspec.json.Encoder().encode


def lines(head: Head, prefix: bytes, events: list[tuple[TraceEvent, int, int]]) -> tuple[Head, bytes]:
    """The lines of ``events`` (event, unix ns, monotonic ns) after ``head``, and the new head."""
    seq, previous, out = head.seq, head.h.encode(), list[bytes]()
    for event, unix_ns, mono_ns in events:
        seq += 1
        line = b'%b%d,"t":%d,"m":%d,%b' % (prefix, seq, unix_ns, mono_ns, _encode(event)[1:-1])
        previous = hashlib.sha256(previous + line).hexdigest()[:16].encode()
        out.append(b'%b,"h":"%b"}\n' % (line, previous))
    chunk = b"".join(out)
    return Head(seq, previous.decode(), head.end + len(chunk)), chunk


class Trace:
    """The trace of one incarnation; its lines wait in ``add`` until the transaction that ``commit`` takes part in.

    A group commit is ``with store.write() as txn: ...; trace.commit(txn)`` and then ``trace.committed()``, or
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
        """Noteworthy lines that are committed, in brief. Of this incarnation."""
        with store.read() as txn:
            self._head = self._next = stored_head(txn)
            self._file, self._written, self._unwritten = _recover(path, txn, self._head, run)
        if self._power:  # the outbox forgets what the file has; so the file must keep its name
            sync_path(path.parent)
        self._trimmed = 0
        self._synced_ns = self._clock.now_ns()

    @property
    def seq(self) -> int:
        """Number of the last committed line."""
        return self._head.seq

    @property
    def waiting(self) -> bool:
        """Whether any line waits for a commit."""
        return bool(self._events)

    def add(self, event: TraceEvent) -> None:
        """Append a line with the next commit; no effect after ``end``."""
        if not self._ended:
            self._events.append((event, self._clock.unix_ns(), self._clock.now_ns()))

    def end(self) -> None:
        """This incarnation tells nothing more."""
        self._ended = True

    def commit(self, txn: Write) -> None:
        """Put the waiting lines into ``txn``, and forget there what has reached the file."""
        self._next, chunk = lines(self._head, self._prefix, self._events)
        if chunk:
            txn.put("outbox", number_key(self._head.end), chunk)
            txn.put("trace", _HEAD, msgspec.msgpack.encode(self._next))
            self._unwritten.append((self._head.end, chunk))
        self._trim(txn)

    def _trim(self, txn: Write) -> None:
        """Forget in the outbox what the file has; after a sync when a power failure counts."""
        self._trimmed = 0
        if self._power:
            if self._clock.now_ns() - self._synced_ns < _SYNC_NS:
                return
            self._synced_ns = self._clock.now_ns()
            if not self._sync(txn):
                return
        for offset in self._written:
            txn.delete("outbox", number_key(offset))
        self._trimmed = len(self._written)

    def _sync(self, txn: Read) -> bool:
        """Whether the file's lines have reached the disk. After a sync that failed the system may have forgotten them:
        they are written once more, and stay in the outbox until a sync succeeds."""
        try:
            os.fdatasync(self._file)
        except OSError:
            with suppress(OSError):
                for offset in self._written:
                    _write_at(self._file, offset, txn.get("outbox", number_key(offset)) or b"")
            return False
        return True

    def committed(self) -> None:
        """The transaction is durable: bring its lines to the file. An ``OSError`` leaves them to the next commit."""
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
        """The transaction failed: its lines never happened."""
        self._events.clear()
        self._trimmed = 0
        self._next = self._head
        self._unwritten = [(offset, chunk) for offset, chunk in self._unwritten if offset < self._head.end]

    def restore(self) -> bool:
        """Write the file again if it was deleted: the open descriptor has all of it. Whether that was so. ``OSError``.

        A file that another process has put there is left alone; the next start compares it with the ledger.
        """
        if self.path.exists() or self._file < 0:
            return False
        beside = self.path.with_name(f".{self.path.name}.restored")
        file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            offset = 0
            while piece := os.pread(self._file, _PIECE, offset):
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
        """Let go of the file. Lines that a full disk does not take now are in the store: the next start brings them."""
        if self._file >= 0:
            with suppress(OSError):
                self._write()
            os.close(self._file)
            self._file = -1


def stored_head(txn: Read) -> Head:
    """Where the committed trace ends."""
    raw = txn.get("trace", _HEAD)
    return Head() if raw is None else msgspec.msgpack.decode(raw, type=Head)


def _write_at(file: int, offset: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        done = os.pwrite(file, view, offset)
        offset, view = offset + done, view[done:]


def _recover(path: Path, txn: Read, head: Head, run: str) -> tuple[int, list[int], list[tuple[int, bytes]]]:
    """Open the file and make it equal to the committed trace. Return the descriptor, the offsets of the outbox pieces
    that the file has, and the pieces that it lacks because the disk has no room.

    All checks come before the first write: a ledger that is older than the trace, or of another run, must not cost a
    line. Only a torn tail is cut.
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
    """``TraceError`` unless the file is the committed trace, but for a torn tail. ``outbox``: its lines from byte
    ``begin`` on."""
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
    """``TraceError`` when the first line names another run."""
    try:
        first = decoded(os.pread(file, _PIECE, 0).partition(b"\n")[0])
    except msgspec.DecodeError:  # torn
        return
    if first.get("run") != run:
        found = f"is of run {run}" if head.seq else "is missing or empty"
        lines = _whole_lines(file, 0, os.fstat(file).st_size)
        raise TraceError(f"it has {lines} lines of run {first.get('run')}, but scheduler/data.mdb {found}; {RESTORE}")


def _check_outbox(file: int, begin: int, outbox: bytes) -> None:
    """``TraceError`` when the file continues with another line than the outbox: one that is whole, and chained to the
    line before. Anything else in its place was torn."""
    found = os.pread(file, len(outbox), begin)
    if outbox.startswith(found):
        return
    same = next(index for index, (ours, theirs) in enumerate(zip(outbox, found, strict=False)) if ours != theirs)
    start = outbox.rfind(b"\n", 0, same) + 1
    line, end, _ = found[start:].partition(b"\n")
    before = _hash_of(outbox[:start]) if start else _hash_before(file, begin)
    if end and before and _hash_of(line + end) == _next_hash(before, line):
        raise TraceError(f"it continues with another history from byte {begin + start} on; {RESTORE}")


def _chains(before: str, outbox: bytes, head: Head) -> bool:
    """Whether what the store has of the trace continues a file whose last line has the hash ``before``."""
    if not outbox:
        return before == head.h
    line, _, _ = outbox.partition(b"\n")
    return bool(before) and _hash_of(line + b"\n") == _next_hash(before, line)


def _hash_before(file: int, end: int) -> str:
    """The hash of the line that ends at this byte; empty when no line does."""
    if not end:
        return NO_HASH
    size = min(end, len(_ENDING))
    return _hash_of(os.pread(file, size, end - size))


def _hash_of(lines: bytes) -> str:
    """The hash of the last of these lines; empty when they do not end with one."""
    found = _ENDS.match(lines[-len(_ENDING) :])
    return found[1].decode() if found else ""


def _next_hash(before: str, line: bytes) -> str:
    body, _, _ = line.rpartition(b',"h":"')
    return hashlib.sha256(before.encode() + body).hexdigest()[:16]


def _whole_lines(file: int, start: int, end: int) -> int:
    """Number of line ends in a part of the file."""
    lines = 0
    while start < end and (piece := os.pread(file, _PIECE, start)):
        lines += piece.count(b"\n")
        start += len(piece)
    return lines


def _takes(file: int, offset: int, chunk: bytes) -> bool:
    """Write it, unless the disk takes no writes now."""
    try:
        _write_at(file, offset, chunk)
    except OSError as error:
        if state_of(error) is None:
            raise
        return False
    return True


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Every line of a trace as it is written, unaudited. ``ConfigError`` names the line that is not an event: one that
    is not JSON, or lacks a field, or has one of another type. What is not known here is kept as it is.

    A last line without its end is being written: it is left out.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield decoded(line)
                except msgspec.DecodeError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise ConfigError("trace", str(path), f"line {number} {complaint(error)}") from error
    except OSError as error:
        raise ConfigError("trace", str(path), f"it cannot be read: {error.strerror}") from error
