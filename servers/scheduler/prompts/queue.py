"""Which prompt is next: what has to be dealt again, then the prompt stream in the order of the composition.

- Group id = epoch * rows + row. A group is dealt once, and again only after it was put back (``again``).
- The deck changes in memory; ``save`` writes what changed into the transaction of the ledger's group commit.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

import msgspec

from staleflow.protocols.consistency.ids import GroupId
from staleflow.servers.scheduler.lengths import log as length_log
from staleflow.servers.scheduler.lengths.expected import Lengths
from staleflow.servers.scheduler.prompts.stream import Clustering, Fresh
from staleflow.store.base import Read, Write, key_number, number_key

TABLES = ("deck", "again", length_log.TABLE)
"""Tables that a store needs for a deck."""

_STATE = b"state"
_AT_ONCE = 512
"""Groups that are put in order at least, when any are asked for."""


class DeckState(msgspec.Struct, frozen=True):
    """What is stored of the deck itself."""

    rows: int = 0
    prompts_sha: str = ""
    cursor: int = 0
    """Groups dealt for the first time."""
    ahead: bytes = b""
    """Which of them were dealt out of turn: ``Fresh.ahead``."""


class Deck:
    """The order of prompts of one run. ``epochs`` 0 goes round for ever."""

    def __init__(
        self, *, seed: int, epochs: int, lengths: Lengths | None = None, clustering: Clustering | None = None
    ) -> None:
        self.lengths = lengths or Lengths()
        """What is expected of each prompt."""
        self._fresh = Fresh(seed=seed, epochs=epochs, expected=self.lengths.expected_of, clustering=clustering)
        self._batch = clustering.batch_size if clustering else 0
        """Fresh groups after which the order of the others is looked at again; 0: never."""
        self._state = DeckState()
        self._moved = False
        """``_state`` is older than what it describes."""
        self._again: list[tuple[int, int]] = []
        """When it is due (a count of fresh groups dealt), and the group; sorted."""
        self._due: dict[int, int] = {}
        self._changes: dict[tuple[int, int], bool] = {}
        self._upcoming: list[GroupId] = []
        self._arranged = True
        """The order of fresh groups is that of the lengths expected about now."""

    def load(self, txn: Read) -> None:
        """Become what was saved last."""
        raw = txn.get("deck", _STATE)
        self._state = DeckState() if raw is None else msgspec.msgpack.decode(raw, type=DeckState)
        self._moved = False
        self._fresh.restore(self._state.rows, self._state.cursor, self._state.ahead)
        self.lengths.rows = self.rows
        self.lengths.load(txn)
        self._again = [(key_number(key[:8]), key_number(key[8:])) for key in txn.keys("again")]
        self._due = {group: due for due, group in self._again}
        self._changes = {}
        self._upcoming = []

    def save(self, txn: Write) -> None:
        """Write what changed since the last ``saved``."""
        if self._moved:
            fresh = self._fresh
            self._state = msgspec.structs.replace(self._state, cursor=fresh.dealt, ahead=fresh.ahead())
            txn.put("deck", _STATE, msgspec.msgpack.encode(self._state))
        for (due, group), there in self._changes.items():
            key = number_key(due) + number_key(group)
            if there:
                txn.put("again", key, b"")
            else:
                txn.delete("again", key)
        self.lengths.save(txn)

    def saved(self) -> None:
        """What was saved is durable."""
        self._moved = False
        self._changes.clear()
        self.lengths.saved()

    @property
    def changed(self) -> bool:
        """Whether there is something to save."""
        return bool(self._changes) or self._moved or self.lengths.changed

    @property
    def endless(self) -> bool:
        """Whether every row comes round again."""
        return self._fresh.endless

    @property
    def rows(self) -> int:
        """Rows of the prompt source; 0 before a trajectory server has said so."""
        return self._fresh.rows

    @property
    def prompts_sha(self) -> str:
        """sha256 of the prompt source."""
        return self._state.prompts_sha

    @property
    def waiting(self) -> int:
        """Groups that wait to be dealt again."""
        return len(self._again)

    def waiting_groups(self) -> Iterator[GroupId]:
        """The groups that wait to be dealt again."""
        return (GroupId(group) for _, group in self._again)

    def set_source(self, rows: int, prompts_sha: str) -> bool:
        """The prompt source, said by a shard; False when it is not the one this run began with."""
        if not self.rows:
            self._state = msgspec.structs.replace(self._state, rows=rows, prompts_sha=prompts_sha)
            self._moved = True
            self._fresh.restore(rows, 0, b"")
            self.lengths.rows = rows
        return (rows, prompts_sha) == (self.rows, self.prompts_sha)

    def left(self) -> int:
        """Groups that can still be dealt; a large number when there is no end."""
        return self._fresh.left() + len(self._again) if self.rows else 0

    def soon(self) -> range:
        """Places of the prompt stream that are dealt next: of this block and the one behind it."""
        return self._fresh.soon() if self.rows else range(0)

    def rows_at(self, places: range) -> list[int]:
        """The prompt row at each place."""
        return [group % self.rows for group in self._fresh.groups(places)]

    def upcoming(self, count: int) -> list[GroupId]:
        """The groups to be dealt next, in order, at most ``count``: those due again come before fresh ones.

        Cheap when asked again; what is dealt may be any of them.
        """
        if not self._arranged:
            self._fresh.arrange()
            self._upcoming = []
            self._arranged = True
        if len(self._upcoming) < min(count, self.left()):
            self._upcoming = self._merged(max(count, _AT_ONCE))
        return self._upcoming[:count]

    def _merged(self, count: int) -> list[GroupId]:
        """What is due again and what is fresh, each in its turn; at the end of the source what is not due yet, too."""
        fresh = self._fresh.first(count)
        merged: list[GroupId] = []
        again = 0
        for dealt, group in enumerate(fresh, start=self._fresh.dealt):
            while again < len(self._again) and self._again[again][0] <= dealt:
                merged.append(GroupId(self._again[again][1]))
                again += 1
            merged.append(GroupId(group))
        if len(fresh) == self._fresh.left():  # the end of the source: nothing else makes the others due
            merged += [GroupId(group) for _, group in self._again[again : again + count]]
        return merged[:count]

    def deal(self) -> GroupId | None:
        """The first of ``upcoming``; None when the source is used up."""
        first = self.upcoming(1)
        if not first:
            return None
        self.deal_group(first[0])
        return first[0]

    def deal_group(self, group: GroupId) -> None:
        """Deal exactly this one of the last ``upcoming``. ``KeyError`` when it does not wait to be dealt."""
        if group in self._upcoming:
            self._upcoming.remove(group)
        if group in self._due:
            self._forget(group)
            return
        self._fresh.deal(group)
        self._moved = True
        if self._batch and self._fresh.dealt % self._batch == 0:
            self._arranged = False

    def again(self, group: GroupId, after: int = 0) -> None:
        """Deal ``group`` again, once ``after`` more fresh groups were dealt."""
        self.take(group)
        due = self._fresh.dealt + after if after else 0
        insort(self._again, (due, group))
        self._due[group] = due
        self._changes[due, group] = True
        self._upcoming = []

    def take(self, group: GroupId) -> None:
        """``group`` was leased again without being dealt; harmless when it is not waiting."""
        if group in self._due:
            self._forget(group)
            self._upcoming = []

    def _forget(self, group: GroupId) -> None:
        item = (self._due.pop(group), group)
        del self._again[bisect_left(self._again, item)]
        self._changes[item] = False
