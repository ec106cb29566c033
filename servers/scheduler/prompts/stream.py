"""The stream of fresh groups, in the order in which they are handed out.

Place p of the run is row p mod rows of the permutation of epoch p // rows; its group is epoch * rows + row. Groups are
drawn in blocks. Only the number of groups handed out and a bitmap of those handed out of order are stored: a restart
neither loses nor repeats a prompt in any order, and the run may continue with another order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.coordination.composition import clustered

BLOCK = 512
"""Places to draw at once when their order is that of the permutation."""
_ENDLESS = 1 << 40
"""Number of groups of an endless source."""
_WORD, _ODD, _OTHER = np.uint64(0xFFFF_FFFF), np.uint64(0x9E37_79B1), np.uint64(0x85EB_CA77)


@dataclass(frozen=True, kw_only=True)
class Clustering:
    """Hand out blocks of ``lookahead`` batches in order of expected length."""

    batch_size: int
    lookahead: int

    @property
    def block(self) -> int:
        """Number of groups that are put in order together."""
        return self.batch_size * self.lookahead


class PromptStream:
    """The prompt stream from its first group that was not handed out."""

    def __init__(
        self,
        *,
        seed: int,
        epochs: int,
        expected: Callable[[Sequence[GroupId]], Sequence[float]],
        clustering: Clustering | None = None,
    ) -> None:
        """``epochs`` 0 repeats the source without end. Without ``clustering``, the order is that of the permutation.

        ``expected``: returns the expected tokens of one sample of each group, 0 where unknown.
        """
        self._seed = seed
        self._epochs = epochs
        self._expected = expected
        self._clustering = clustering
        self._block = BLOCK if clustering is None else clustering.block
        self.rows = 0
        self.num_popped = 0
        """Number of groups handed out so far."""
        self._ahead: int = 0
        self._base: int = 0
        """All places before this one were handed out."""
        self._drawn: int = 0
        """All places before this one were drawn."""
        self._waiting: dict[int, int] = {}
        """Place by group: drawn but not handed out, in order."""

    def restore(self, rows: int, num_popped: int, ahead: bytes) -> None:
        """Continue after ``num_popped`` groups, including those out of order, which ``ahead`` marks (see ``ahead``)."""
        self.rows = rows
        self.num_popped = num_popped
        self._ahead = int.from_bytes(ahead, "little")
        self._base = self._drawn = num_popped - self._ahead.bit_count()
        self._waiting = {}

    def ahead(self) -> bytes:
        """Bitmap of places handed out of order. Bit i is the place i after the first one that was not handed out."""
        return self._ahead.to_bytes((self._ahead.bit_length() + 7) // 8, "little")

    def num_left(self) -> int:
        """Number of groups that can still be handed out; a large number for an endless source."""
        return self._end() - self.num_popped

    def _end(self) -> int:
        return 0 if not self.rows else self._epochs * self.rows if self._epochs else _ENDLESS

    def peek(self, count: int) -> list[int]:
        """Return the next ``count`` groups, fewer at the end of the source."""
        while len(self._waiting) < count and self._drawn < self._end():
            self._draw()
        return list(islice(self._waiting, count))

    def pop(self, group: int) -> None:
        """Hand out ``group``, one of ``peek``; it never returns to the stream."""
        place = self._waiting.pop(group)
        self.num_popped += 1
        self._ahead |= 1 << (place - self._base)
        passed = (~self._ahead & self._ahead + 1).bit_length() - 1  # number of trailing ones
        self._ahead >>= passed
        self._base += passed

    def arrange(self) -> None:
        """Put the remaining groups of each block in order again, by the current expected lengths."""
        waiting, self._waiting = self._waiting, {}
        blocks: dict[int, list[tuple[int, int]]] = {}
        for group, place in waiting.items():
            blocks.setdefault(place // self._block, []).append((group, place))
        for drawn in blocks.values():
            self._append(sorted(drawn, key=lambda item: item[1]))

    def next_places(self) -> range:
        """Places of the current block and the next one, from the first that was not handed out."""
        return range(self._base, min((self._base // self._block + 2) * self._block, self._end()))

    def groups(self, places: range) -> list[int]:
        """Return the group at each place."""
        groups: list[int] = []
        start = places.start
        while start < places.stop:
            epoch, first = divmod(start, self.rows)
            count = min(places.stop - start, self.rows - first)
            part = permuted(first, count, self.rows, seed=self._seed, epoch=epoch)
            groups += [epoch * self.rows + row for row in part]
            start += count
        return groups

    def _draw(self) -> None:
        """Draw one more block, without the groups of it that were handed out before a restart."""
        places = range(self._drawn, min((self._drawn // self._block + 1) * self._block, self._end()))
        self._drawn = places.stop
        drawn = zip(self.groups(places), places, strict=True)
        self._append([(g, p) for g, p in drawn if not self._ahead >> (p - self._base) & 1])

    def _append(self, drawn: list[tuple[int, int]]) -> None:
        """Append one block in its order. ``drawn``: its groups with their places, sorted by place."""
        if self._clustering is not None and drawn:
            lengths = self._expected([GroupId(group) for group, _ in drawn])
            # Alternating directions put the long groups of two blocks side by side, where they wait for each other.
            longest_first = drawn[0][1] // self._block % 2 == 1
            drawn = [drawn[position] for position in clustered(lengths, longest_first=longest_first)]
        self._waiting.update(drawn)


class SubmittedStream(PromptStream):
    """The stream of submitted rows, in the order of their submission, each once. It ends at the last row so far."""

    def __init__(
        self,
        num_rows: Callable[[], int],
        *,
        expected: Callable[[Sequence[GroupId]], Sequence[float]],
        clustering: Clustering | None = None,
    ) -> None:
        """``num_rows``: returns the number of submitted rows. The others are as in ``PromptStream``."""
        super().__init__(seed=0, epochs=1, expected=expected, clustering=clustering)
        self._num_rows = num_rows

    def _end(self) -> int:
        return self._num_rows() if self.rows else 0

    def groups(self, places: range) -> list[int]:
        return list(places)

    def is_waiting(self, row: int) -> bool:
        """Return whether a row was not handed out."""
        return row >= self._base and not self._ahead >> (row - self._base) & 1


def permuted(start: int, count: int, rows: int, *, seed: int, epoch: int) -> list[int]:
    """Return places ``start`` .. ``start + count - 1`` of the permutation of ``range(rows)`` for a seed and an epoch.

    Memory does not grow with the rows. Four Feistel rounds over the smallest even power of two that is at least
    ``rows``; values outside the range are mapped again until they fall inside (cycle walking), which keeps the mapping
    a permutation.
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
