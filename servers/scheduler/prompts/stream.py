"""Groups that were never dealt, in the order in which they will be.

Place p of the run is row p mod rows of the permutation of epoch p // rows; its group is epoch * rows + row. Groups are
drawn by the block. What is kept of it all is how many were dealt, and which of them out of turn: so a restart, whatever
the order was, neither loses nor repeats a prompt, and another order may go on from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.coordination.composition import clustered
from staleflow.servers.scheduler.prompts.permutation import permuted

BLOCK = 512
"""Places that are drawn at once when their order is the permutation's."""
_FOR_EVER = 1 << 40
"""Stands for the end of a source that has none."""


@dataclass(frozen=True, kw_only=True)
class Clustering:
    """Blocks of ``lookahead`` batches are dealt in order of expected length."""

    batch_size: int
    lookahead: int

    @property
    def block(self) -> int:
        """Groups that are put in order together."""
        return self.batch_size * self.lookahead


class Fresh:
    """The prompt stream from its first group that was not dealt."""

    def __init__(
        self,
        *,
        seed: int,
        epochs: int,
        expected: Callable[[Sequence[GroupId]], Sequence[float]],
        clustering: Clustering | None = None,
    ) -> None:
        """``epochs`` 0 goes round for ever. Without ``clustering`` the order is the permutation's.

        ``expected``: tokens of a sample of each group, 0 for those that nothing is known of.
        """
        self._seed = seed
        self._epochs = epochs
        self._expected = expected
        self._clustering = clustering
        self._block = BLOCK if clustering is None else clustering.block
        self.rows = 0
        self.dealt = 0
        """Groups dealt so far."""
        self._ahead: int = 0
        self._base: int = 0
        """Places before this one were all dealt,"""
        self._drawn: int = 0
        """and before this one all drawn."""
        self._waiting: dict[int, int] = {}
        """Drawn and not dealt: group and place, in order."""

    def restore(self, rows: int, dealt: int, ahead: bytes) -> None:
        """Go on behind ``dealt`` groups, those out of turn included, which ``ahead`` marks (see there)."""
        self.rows = rows
        self.dealt = dealt
        self._ahead = int.from_bytes(ahead, "little")
        self._base = self._drawn = dealt - self._ahead.bit_count()
        self._waiting = {}

    def ahead(self) -> bytes:
        """Bit i: the place i behind the first one that was not dealt was dealt out of turn."""
        return self._ahead.to_bytes((self._ahead.bit_length() + 7) // 8, "little")

    @property
    def endless(self) -> bool:
        """Whether there is always another epoch."""
        return not self._epochs

    def left(self) -> int:
        """Groups that can still be dealt; a large number when there is no end."""
        return self._end() - self.dealt

    def _end(self) -> int:
        return 0 if not self.rows else self._epochs * self.rows if self._epochs else _FOR_EVER

    def first(self, count: int) -> list[int]:
        """The next ``count`` groups, fewer at the end of the source."""
        while len(self._waiting) < count and self._drawn < self._end():
            self._draw()
        return list(islice(self._waiting, count))

    def deal(self, group: int) -> None:
        """``group`` is one of ``first``; it never comes again."""
        place = self._waiting.pop(group)
        self.dealt += 1
        self._ahead |= 1 << (place - self._base)
        passed = (~self._ahead & self._ahead + 1).bit_length() - 1
        self._ahead >>= passed
        self._base += passed

    def arrange(self) -> None:
        """Put what is left of each block in order again, by what is known now."""
        waiting, self._waiting = self._waiting, {}
        blocks: dict[int, list[tuple[int, int]]] = {}
        for group, place in waiting.items():
            blocks.setdefault(place // self._block, []).append((group, place))
        for drawn in blocks.values():
            self._append(sorted(drawn, key=lambda item: item[1]))

    def soon(self) -> range:
        """Places of this block and the next one, from the first that was not dealt."""
        return range(self._base, min((self._base // self._block + 2) * self._block, self._end()))

    def groups(self, places: range) -> list[int]:
        """The group at each place."""
        found: list[int] = []
        start = places.start
        while start < places.stop:
            epoch, first = divmod(start, self.rows)
            count = min(places.stop - start, self.rows - first)
            part = permuted(first, count, self.rows, seed=self._seed, epoch=epoch)
            found += [epoch * self.rows + row for row in part]
            start += count
        return found

    def _draw(self) -> None:
        """One more block, without what was dealt of it."""
        places = range(self._drawn, min((self._drawn // self._block + 1) * self._block, self._end()))
        self._drawn = places.stop
        drawn = zip(self.groups(places), places, strict=True)
        self._append([(g, p) for g, p in drawn if not self._ahead >> (p - self._base) & 1])

    def _append(self, drawn: list[tuple[int, int]]) -> None:
        """``drawn``: groups of one block and their places, by place."""
        if self._clustering is not None and drawn:
            lengths = self._expected([GroupId(group) for group, _ in drawn])
            longest_first = drawn[0][1] // self._block % 2 == 1
            drawn = [drawn[position] for position in clustered(lengths, longest_first=longest_first)]
        self._waiting.update(drawn)
