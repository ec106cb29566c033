"""Order of prompts: requeued groups that are due, then the prompt stream in the order of the composition.

- Group id = epoch * rows + row. A group is handed out once, and again only after ``requeue``.
- Rows that clients submit are numbered in order. Their "epoch" counts the returns of a row: ``outcomes``.
- The queue changes in memory; ``save`` writes the changes into the transaction of the ledger's group commit.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

import msgspec

from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import SUBMITTED_ROWS
from staleflow.servers.scheduler.lengths import log as length_log
from staleflow.servers.scheduler.lengths.expected import Lengths
from staleflow.servers.scheduler.prompts import outcome_log, submissions
from staleflow.servers.scheduler.prompts.outcome_log import OutcomeLog
from staleflow.servers.scheduler.prompts.stream import Clustering, PromptStream, SubmittedStream
from staleflow.servers.scheduler.prompts.submissions import Submissions
from staleflow.servers.scheduler.prompts.tries import GroupTries
from staleflow.store.base import Read, Write, key_number, number_key

TABLES = ("deck", "again", length_log.TABLE, *submissions.TABLES, *outcome_log.TABLES)
"""Store tables of the prompt queue."""

_STATE = b"state"
_MIN_ORDERED = 512
"""Minimum number of groups to put in order at once."""


class QueueState(msgspec.Struct, frozen=True):
    """Stored state of the queue itself."""

    rows: int = 0
    prompts_sha: str = ""
    cursor: int = 0
    """Number of fresh groups handed out."""
    ahead: bytes = b""
    """Bitmap of the groups among them that were handed out of order: ``PromptStream.ahead``."""


class PromptQueue:
    """Order of the prompts of one run. ``epochs`` 0 repeats the source without end."""

    def __init__(
        self,
        *,
        seed: int,
        epochs: int,
        lengths: Lengths | None = None,
        clustering: Clustering | None = None,
        submitted: bool = False,
    ) -> None:
        """``submitted``: clients submit the rows, each for one group."""
        self.lengths = lengths or Lengths()
        """Expected length of each prompt's samples."""
        self.tries = GroupTries()
        self.submissions = Submissions() if submitted else None
        """Rows of clients; None if the rows come from the configured source."""
        self.outcomes = OutcomeLog() if submitted else None
        """Outcomes of these rows."""
        self._submitted: SubmittedStream | None = None
        expected = self.lengths.expected_of
        if self.submissions is None:
            self._stream = PromptStream(seed=seed, epochs=epochs, expected=expected, clustering=clustering)
        else:
            rows = self.submissions
            self._stream = self._submitted = SubmittedStream(
                lambda: rows.num_rows, expected=expected, clustering=clustering
            )
        self._batch = clustering.batch_size if clustering else 0
        """Number of fresh groups after which the remaining ones are put in order again; 0: never."""
        self._state = QueueState()
        self._moved = False
        """The stream has advanced since ``_state`` was written."""
        self._requeued: list[tuple[int, int]] = []
        """Requeued groups: (number of fresh groups handed out at which it is due, group), sorted."""
        self._due: dict[int, int] = {}
        self._changes: dict[tuple[int, int], bool] = {}
        self._upcoming: list[GroupId] = []
        self._arranged = True
        """The fresh groups are ordered by the current expected lengths."""

    def load(self, txn: Read) -> None:
        """Restore the last saved state."""
        for part in self._parts():
            part.load(txn)
        raw = txn.get("deck", _STATE)
        self._state = QueueState() if raw is None else msgspec.msgpack.decode(raw, type=QueueState)
        self._moved = False
        self._stream.restore(self._state.rows, self._state.cursor, self._state.ahead)
        self.lengths.rows = self.rows
        self.lengths.load(txn)
        self._requeued = [(key_number(key[:8]), key_number(key[8:])) for key in txn.keys("again")]
        self._due = {group: due for due, group in self._requeued}
        self._changes = {}
        self._upcoming = []

    def save(self, txn: Write) -> None:
        """Write the changes since the last call of ``saved``."""
        if self._moved:
            fresh = self._stream
            self._state = msgspec.structs.replace(self._state, cursor=fresh.num_popped, ahead=fresh.ahead())
            txn.put("deck", _STATE, msgspec.msgpack.encode(self._state))
        for (due, group), queued in self._changes.items():
            key = number_key(due) + number_key(group)
            if queued:
                txn.put("again", key, b"")
            else:
                txn.delete("again", key)
        for part in (self.lengths, *self._parts()):
            part.save(txn)

    def saved(self) -> None:
        """Note that the changes of ``save`` are durable: a failed commit must write them again."""
        self._moved = False
        self._changes.clear()
        for part in (self.lengths, *self._parts()):
            part.saved()

    @property
    def changed(self) -> bool:
        """True if unsaved changes exist."""
        return bool(self._changes) or self._moved or any(part.changed for part in (self.lengths, *self._parts()))

    def _parts(self) -> list[GroupTries | Submissions | OutcomeLog]:
        """Return the parts that are loaded and saved with the queue."""
        return [part for part in (self.tries, self.submissions, self.outcomes) if part is not None]

    @property
    def rows(self) -> int:
        """Rows of the prompt source; 0 before a trajectory server has reported them."""
        return self._stream.rows

    @property
    def prompts_sha(self) -> str:
        """SHA-256 of the prompt source."""
        return self._state.prompts_sha

    @property
    def num_requeued(self) -> int:
        """Number of requeued groups."""
        return len(self._requeued)

    def requeued_groups(self) -> Iterator[GroupId]:
        """Iterate over the requeued groups, in the order in which they are due."""
        return (GroupId(group) for _, group in self._requeued)

    def set_source(self, rows: int, prompts_sha: str) -> bool:
        """Set the prompt source that a shard reports; return False if the run started with another one."""
        if not self.rows:
            self._state = msgspec.structs.replace(self._state, rows=rows, prompts_sha=prompts_sha)
            self._moved = True
            self._stream.restore(rows, 0, b"")
            self.lengths.rows = rows
        return (rows, prompts_sha) == (self.rows, self.prompts_sha)

    def num_left(self) -> int:
        """Number of groups that can still be handed out; a large number for an endless source."""
        return self._stream.num_left() + len(self._requeued) if self.rows else 0

    def is_open(self) -> bool:
        """Return whether clients may still submit rows, so that an empty queue is not the end of the prompts."""
        return self.submissions is not None and not self.submissions.ended

    def num_pending(self) -> int:
        """Number of submitted rows that wait for a rollout worker, also before a trajectory server has attached."""
        fresh = 0 if self.submissions is None else self.submissions.num_rows - self._stream.num_popped
        return fresh + len(self._requeued)

    def is_queued(self, group: GroupId) -> bool:
        """Return whether a group of a submitted row waits to be handed out, for the first time or again."""
        waits = self._submitted is not None and group < SUBMITTED_ROWS and self._submitted.is_waiting(group)
        return waits or group in self._due

    def start_session(self) -> None:
        """Clear what the end of the last session left: the tries of failing prompts, and the end of submissions."""
        self.tries.clear()
        if self.submissions is not None:
            self.submissions.reopen()

    def submitted(self) -> None:
        """Note that rows were submitted."""
        self._upcoming = []

    def next_places(self) -> range:
        """Places of the prompt stream that come next: the rest of the current block, and the next block."""
        return self._stream.next_places() if self.rows else range(0)

    def rows_at(self, places: range) -> list[int]:
        """Return the prompt row at each place."""
        return [group % self.rows for group in self._stream.groups(places)]

    def upcoming(self, count: int) -> list[GroupId]:
        """Return at most ``count`` next groups, in order: requeued groups that are due come before fresh ones.

        The result is cached between calls. ``pop_group`` accepts any of these groups.
        """
        if not self._arranged:
            self._stream.arrange()
            self._upcoming = []
            self._arranged = True
        if len(self._upcoming) < min(count, self.num_left()):
            self._upcoming = self._merged(max(count, _MIN_ORDERED))
        return self._upcoming[:count]

    def _merged(self, count: int) -> list[GroupId]:
        """Merge requeued and fresh groups by due time; at the end of the source, include those that are not due yet."""
        fresh = self._stream.peek(count)
        merged: list[GroupId] = []
        position = 0
        for num_popped, group in enumerate(fresh, start=self._stream.num_popped):
            while position < len(self._requeued) and self._requeued[position][0] <= num_popped:
                merged.append(GroupId(self._requeued[position][1]))
                position += 1
            merged.append(GroupId(group))
        # At the end of the source no fresh groups follow, so the count would never reach the other due times.
        if len(fresh) == self._stream.num_left():
            merged += [GroupId(group) for _, group in self._requeued[position : position + count]]
        return merged[:count]

    def pop(self) -> GroupId | None:
        """Hand out the first of ``upcoming``; None if the source is exhausted."""
        first = self.upcoming(1)
        if not first:
            return None
        self.pop_group(first[0])
        return first[0]

    def pop_group(self, group: GroupId) -> None:
        """Hand out one group of the last ``upcoming``. Raises ``KeyError`` if it is neither fresh nor requeued."""
        if group in self._upcoming:
            self._upcoming.remove(group)
        if group in self._due:
            self._forget(group)
            return
        self._stream.pop(group)
        self._moved = True
        if self._batch and self._stream.num_popped % self._batch == 0:
            self._arranged = False

    def requeue(self, group: GroupId, after: int = 0) -> None:
        """Hand ``group`` out again, once ``after`` more fresh groups have been handed out; 0 puts it first."""
        self.discard(group)
        due = self._stream.num_popped + after if after else 0
        insort(self._requeued, (due, group))
        self._due[group] = due
        self._changes[due, group] = True
        self._upcoming = []

    def discard(self, group: GroupId) -> None:
        """Remove a requeued group, for example because the ledger leased it again itself; no-op if it is not queued."""
        if group in self._due:
            self._forget(group)
            self._upcoming = []

    def _forget(self, group: GroupId) -> None:
        item = (self._due.pop(group), group)
        del self._requeued[bisect_left(self._requeued, item)]
        self._changes[item] = False
