"""Rows that clients submit at run time: numbered in order, each submission once.

A row stays stored until no event can lease, train or redeliver its group again. Changes are made in memory; ``save``
writes them into the transaction of the ledger's group commit, before the submission is acknowledged.
"""

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from staleflow.store.base import Read, Write, key_number, number_key

ROWS, IDS = "submitted", "submissions"
TABLES = (ROWS, IDS)
"""Store tables: rows by their number, and submissions by theirs."""
MAX_SUBMISSIONS = 16_384
"""Maximum number of submissions whose ids are stored; beyond it, the oldest one is deleted."""
_STATE = b"state"


class Submission(msgspec.Struct, frozen=True, array_like=True):
    """One acknowledged submission."""

    id: str
    first: int
    """Number of its first row."""
    sha: str
    """Hash of its rows, by which a repetition with other rows is recognized."""


class _Stored(msgspec.Struct, frozen=True):
    num_rows: int = 0
    num_submissions: int = 0
    ended: bool = False


class Submissions:
    """The rows of one run, and the ids of the newest submissions."""

    def __init__(self) -> None:
        self._state = _Stored()
        self._ids: dict[str, Submission] = {}
        self._new_ids: list[Submission] = []
        self._rows: dict[int, None] = {}
        """Numbers of the stored rows, ascending."""
        self._new_rows: dict[int, bytes] = {}
        self._deleted: list[int] = []
        self._unscanned: list[int] = []
        """Stored rows that the current pass of ``delete_unneeded`` has not reached, descending."""
        self._state_changed = False

    @property
    def num_rows(self) -> int:
        """Number of rows submitted so far: the number of the next row."""
        return self._state.num_rows

    def __contains__(self, row: int) -> bool:
        """Return whether a row was submitted and is not deleted."""
        return row in self._rows

    @property
    def ended(self) -> bool:
        """True once a client has declared that no more rows will come."""
        return self._state.ended

    def reopen(self) -> None:
        """Accept rows again, after a client has ended the submissions."""
        self._set(ended=False)

    def find(self, id: str) -> Submission | None:
        """Return the submission of that id; None if there is none, or if ``MAX_SUBMISSIONS`` newer ones exist."""
        return self._ids.get(id)

    def add(self, id: str, sha: str, rows: Sequence[bytes], *, last: bool) -> Submission:
        """Append encoded rows under a new id. ``last``: no more rows will come."""
        submission = Submission(id, self.num_rows, sha)
        self._new_rows |= dict(enumerate(rows, start=self.num_rows))
        self._rows |= dict.fromkeys(self._new_rows)
        self._ids[id] = submission
        self._new_ids.append(submission)
        if len(self._ids) > MAX_SUBMISSIONS:
            del self._ids[next(iter(self._ids))]
        self._set(num_rows=self.num_rows + len(rows), ended=self.ended or last)
        return submission

    def delete_unneeded(self, needed: Callable[[int], bool], at_most: int) -> list[int]:
        """Check up to ``at_most`` rows, each in its turn, and delete those that are not ``needed``; return them."""
        if not self._unscanned:
            self._unscanned = list(reversed(self._rows))
        passed = [self._unscanned.pop() for _ in range(min(at_most, len(self._unscanned)))]
        unneeded = [row for row in passed if not needed(row)]
        for row in unneeded:
            del self._rows[row]
        self._deleted += unneeded
        return unneeded

    def _set(self, **fields: int) -> None:
        self._state = msgspec.structs.replace(self._state, **fields)
        self._state_changed = True

    # --- storage -------------------------------------------------------------------------------------------------

    def load(self, txn: Read) -> None:
        """Restore the last saved state."""
        self.saved()
        raw = txn.get(IDS, _STATE)
        self._state = _Stored() if raw is None else msgspec.msgpack.decode(raw, type=_Stored)
        stored = (value for key, value in txn.items(IDS) if key != _STATE)
        self._ids = {one.id: one for one in (msgspec.msgpack.decode(value, type=Submission) for value in stored)}
        self._rows = dict.fromkeys(map(key_number, txn.keys(ROWS)))
        self._unscanned = []

    @property
    def changed(self) -> bool:
        """True if unsaved changes exist."""
        return self._state_changed or bool(self._deleted)

    def save(self, txn: Write) -> None:
        """Write the changes since the last call of ``saved``."""
        for row, encoded in self._new_rows.items():
            txn.put(ROWS, number_key(row), encoded)
        for row in self._deleted:
            txn.delete(ROWS, number_key(row))
        for number, submission in enumerate(self._new_ids, start=self._state.num_submissions):
            txn.put(IDS, number_key(number), msgspec.msgpack.encode(submission))
            if number >= MAX_SUBMISSIONS:
                txn.delete(IDS, number_key(number - MAX_SUBMISSIONS))
        if self._state_changed:
            total = self._state.num_submissions + len(self._new_ids)
            txn.put(IDS, _STATE, msgspec.msgpack.encode(msgspec.structs.replace(self._state, num_submissions=total)))

    def saved(self) -> None:
        """Note that the changes of ``save`` are durable."""
        total = self._state.num_submissions + len(self._new_ids)
        self._state = msgspec.structs.replace(self._state, num_submissions=total)
        self._new_ids, self._new_rows, self._deleted, self._state_changed = [], {}, [], False


def encoded_row(txn: Read, row: int) -> bytes | None:
    """Return a committed row as it is sent; None if it is deleted, or was never submitted."""
    return txn.get(ROWS, number_key(row)) if row >= 0 else None


def digest(rows: Sequence[bytes], *, last: bool) -> str:
    """Return the hash that identifies the content of a submission."""
    sha = hashlib.sha256(b"last" if last else b"")
    for row in rows:
        sha.update(len(row).to_bytes(8, "little") + row)
    return sha.hexdigest()
