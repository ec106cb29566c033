"""Prompt rows of a shard: all of them in memory, or those that clients submit, requested from the scheduler on demand.

Submitted rows stay in the scheduler's store for as long as a group may need them, so a shard only caches them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from staleflow.configs.loading.prompt_rows import PromptRows
from staleflow.net.client import Client
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import SUBMITTED_ROWS, GetSubmittedRows, SubmittedRows
from staleflow.protocols.wire.messages.prompts import MAX_ROWS

CACHE_BYTES = 64 << 20
"""Maximum size of the cached rows."""
SUBMITTED = "submitted"
"""Stands for the sha256 of rows that are not known beforehand."""

Row = dict[str, Any]
_decoder = msgspec.msgpack.Decoder(Row)


class Prompts(Protocol):
    """Rows by group."""

    num_rows: int
    """Number of rows of the source: group ``epoch * num_rows + row`` has row ``row``."""
    sha: str
    """SHA-256 of the source."""

    def has(self, groups: Sequence[GroupId]) -> bool:
        """Return whether the rows of all groups are in memory."""
        ...

    def row(self, group: GroupId) -> Row:
        """Return a row that is in memory."""
        ...

    async def fetch(self, groups: Sequence[GroupId], most_bytes: int | None = None) -> dict[GroupId, Row | None]:
        """Return the rows of the groups; with ``most_bytes``, those of the first groups, until they have that size.

        None for a row that is deleted, because its group is over.
        """
        ...


class LoadedPrompts:
    """The rows of the configured source."""

    def __init__(self, rows: PromptRows) -> None:
        self._rows = rows
        self.num_rows, self.sha = len(rows), rows.sha

    def has(self, groups: Sequence[GroupId]) -> bool:
        """Return True: all rows are in memory."""
        return True

    def row(self, group: GroupId) -> Row:
        """Return the row of a group."""
        return self._rows[group % self.num_rows]

    async def fetch(self, groups: Sequence[GroupId], most_bytes: int | None = None) -> dict[GroupId, Row | None]:
        """Return the rows of all groups."""
        return {group: self.row(group) for group in groups}


class SubmittedPrompts:
    """Rows that clients submit to the scheduler."""

    num_rows, sha = SUBMITTED_ROWS, SUBMITTED

    def __init__(self, scheduler: Client, cache_bytes: int = CACHE_BYTES) -> None:
        self._scheduler = scheduler
        self._cache = OrderedDict[int, bytes]()
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0

    def has(self, groups: Sequence[GroupId]) -> bool:
        """Return whether the rows of all groups are cached."""
        return all(group % SUBMITTED_ROWS in self._cache for group in groups)

    def row(self, group: GroupId) -> Row:
        """Return a cached row."""
        row = group % SUBMITTED_ROWS
        self._cache.move_to_end(row)
        return _decoder.decode(self._cache[row])

    async def fetch(self, groups: Sequence[GroupId], most_bytes: int | None = None) -> dict[GroupId, Row | None]:
        """Request the rows that are not cached. Raise ``Refused`` if the run is over."""
        found = dict[GroupId, Row | None]()
        nbytes = 0
        for start in range(0, len(groups), MAX_ROWS):
            rest = list(groups[start : start + MAX_ROWS])
            while rest and (most_bytes is None or not found or nbytes < most_bytes):
                encoded = await self._some(rest)
                found |= {group: None if row is None else _decoder.decode(row) for group, row in encoded.items()}
                nbytes += sum(len(row) for row in encoded.values() if row is not None)
                del rest[: len(encoded)]
        return found

    async def _some(self, groups: Sequence[GroupId]) -> dict[GroupId, bytes | None]:
        """Return the encoded rows of at least the first group, and of those that follow it while a reply has room."""
        encoded: dict[GroupId, bytes | None] = {}
        for group in groups:
            if (row := self._cached(group % SUBMITTED_ROWS)) is None:
                break
            encoded[group] = row
        if encoded:
            return encoded
        rows = [group % SUBMITTED_ROWS for group in groups]
        answer, frames = await self._scheduler.call(GetSubmittedRows(rows=rows), timeout_s=None)
        if not isinstance(answer, SubmittedRows) or not 0 < len(answer.sizes) <= len(rows) or len(frames) != 1:
            raise ProtocolError(Code.MALFORMED, f"{self._scheduler.address} did not reply with the requested rows")
        start = 0
        for group, number, size in zip(groups, rows, answer.sizes, strict=False):
            encoded[group] = None if size < 0 else bytes(frames[0][start : start + size])
            start += max(size, 0)
            self._put(number, encoded[group])
        return encoded

    def _cached(self, row: int) -> bytes | None:
        if (encoded := self._cache.get(row)) is not None:
            self._cache.move_to_end(row)
        return encoded

    def _put(self, row: int, encoded: bytes | None) -> None:
        """Cache a row in place of those that were not used for the longest time."""
        if encoded is None or row in self._cache:
            return
        self._cache[row] = encoded
        self._cached_bytes += len(encoded)
        while self._cached_bytes > self._cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= len(oldest)
