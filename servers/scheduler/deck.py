"""Which prompt is next: a seeded permutation of the rows each epoch, and what has to be dealt again.

- Group id = epoch * rows + row. A group is dealt once, and again only after it was put back (``again``).
- The permutation is computed row by row (a Feistel network), so that a billion rows cost nothing.
- The deck changes in memory; ``save`` writes what changed into the transaction of the ledger's group commit.
"""

from heapq import heapify, heappop, heappush

import msgspec
import numpy as np

from staleflow.protocols.consistency.ids import GroupId
from staleflow.runtime.lmdb_store import Read, Write, key_number, number_key

TABLES = ("deck", "again")
"""Tables that a store needs for a deck."""

_STATE = b"state"
_BLOCK = 1024
"""Places of the permutation that are computed at once."""
_WORD, _ODD, _OTHER = np.uint64(0xFFFF_FFFF), np.uint64(0x9E37_79B1), np.uint64(0x85EB_CA77)


class DeckState(msgspec.Struct, frozen=True):
    """What is stored of the deck itself."""

    rows: int = 0
    prompts_sha: str = ""
    cursor: int = 0
    """Groups dealt for the first time."""


def permuted(start: int, count: int, rows: int, *, seed: int, epoch: int) -> list[int]:
    """Places ``start`` .. ``start + count - 1`` of a permutation of ``range(rows)``; another epoch, another order.

    Four Feistel rounds over the smallest square of a power of two that holds the rows, again for those that fall
    outside of them.
    """
    half = max(((rows - 1).bit_length() + 1) // 2, 1)
    mask = (1 << half) - 1
    keys = np.random.SeedSequence((seed, epoch)).generate_state(4, np.uint32).astype(np.uint64)
    places = np.arange(start, start + count, dtype=np.uint64)
    outside = np.ones(count, dtype=np.bool_)
    while outside.any():
        left, right = places[outside] >> half, places[outside] & mask
        for key in keys:
            mixed = (right ^ key) * _ODD & _WORD
            mixed = (mixed ^ mixed >> 15) * _OTHER & _WORD
            left, right = right, left ^ (mixed >> 7 & mask)
        places[outside] = left << half | right
        outside = places >= rows
    return places.tolist()


class Deck:
    """The order of prompts of one run. ``epochs`` 0 goes round for ever."""

    def __init__(self, *, seed: int, epochs: int) -> None:
        self._seed = seed
        self._epochs = epochs
        self._state = self._saved = DeckState()
        self._again: list[tuple[int, int]] = []
        self._groups: set[int] = set()
        self._changes: dict[tuple[int, int], bool] = {}
        self._block: tuple[int, int, list[int]] = (-1, 0, [])
        """Epoch, first place and rows of the part of the permutation that is being dealt."""

    def load(self, txn: Read) -> None:
        """Become what was saved last."""
        raw = txn.get("deck", _STATE)
        self._state = self._saved = DeckState() if raw is None else msgspec.msgpack.decode(raw, type=DeckState)
        self._again = [(key_number(key[:8]), key_number(key[8:])) for key in txn.keys("again")]
        self._groups = {group for _, group in self._again}
        self._changes = {}

    def save(self, txn: Write) -> None:
        """Write what changed since the last ``saved``."""
        if self._state != self._saved:
            txn.put("deck", _STATE, msgspec.msgpack.encode(self._state))
        for (due, group), there in self._changes.items():
            key = number_key(due) + number_key(group)
            if there:
                txn.put("again", key, b"")
            else:
                txn.delete("again", key)

    def saved(self) -> None:
        """What was saved is durable."""
        self._saved = self._state
        self._changes.clear()

    @property
    def changed(self) -> bool:
        """Whether there is something to save."""
        return bool(self._changes) or self._state is not self._saved

    @property
    def rows(self) -> int:
        """Rows of the prompt source; 0 before a trajectory server has said so."""
        return self._state.rows

    @property
    def prompts_sha(self) -> str:
        """sha256 of the prompt source."""
        return self._state.prompts_sha

    @property
    def waiting(self) -> int:
        """Groups that wait to be dealt again."""
        return len(self._again)

    def set_source(self, rows: int, prompts_sha: str) -> bool:
        """The prompt source, said by a shard; False when it is not the one this run began with."""
        if not self._state.rows:
            self._state = msgspec.structs.replace(self._state, rows=rows, prompts_sha=prompts_sha)
        return (rows, prompts_sha) == (self._state.rows, self._state.prompts_sha)

    def left(self) -> int:
        """Groups that can still be dealt; a large number when there is no end."""
        if not self._state.rows:
            return 0
        fresh = self._epochs * self._state.rows - self._state.cursor if self._epochs else 1 << 40
        return fresh + len(self._again)

    def deal(self) -> GroupId | None:
        """The next group: one that is due again, else a fresh one; None when the source is used up."""
        state = self._state
        if self._again and (self._again[0][0] <= state.cursor or self.left() == len(self._again)):
            item = heappop(self._again)
            self._change(item, there=False)
            return GroupId(item[1])
        if self.left() == 0:
            return None
        self._state = DeckState(state.rows, state.prompts_sha, state.cursor + 1)
        return GroupId(self._fresh(*divmod(state.cursor, state.rows)))

    def _fresh(self, epoch: int, place: int) -> int:
        """The group at a place of an epoch."""
        rows = self._state.rows
        start = place - place % _BLOCK
        if self._block[:2] != (epoch, start):
            count = min(_BLOCK, rows - start)
            self._block = (epoch, start, permuted(start, count, rows, seed=self._seed, epoch=epoch))
        return epoch * rows + self._block[2][place - start]

    def again(self, group: GroupId, after: int = 0) -> None:
        """Deal ``group`` again, once ``after`` more fresh groups were dealt."""
        item = (self._state.cursor + after if after else 0, int(group))
        heappush(self._again, item)
        self._change(item, there=True)

    def take(self, group: GroupId) -> None:
        """``group`` was leased again without being dealt; harmless when it is not waiting."""
        if group in self._groups:
            item = next(item for item in self._again if item[1] == group)
            self._again.remove(item)
            heapify(self._again)
            self._change(item, there=False)

    def _change(self, item: tuple[int, int], *, there: bool) -> None:
        self._changes[item] = there
        if there:
            self._groups.add(item[1])
        else:
            self._groups.discard(item[1])
