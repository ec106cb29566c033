"""Submit the prompts of a run while it is active, and read what became of them::

    with staleflow.PromptClient("runs/live") as client:           # prompts.submitted = true
        client.submit([{"prompt": "1 + 1 =", "answer": 2}])
        for outcome in client.outcomes():
            print(outcome.row, outcome.result, outcome.reward)

``PromptClient`` blocks, ``AsyncPromptClient`` is the same for asyncio.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from staleflow.clients.attached import ATTACH_TIMEOUT_S, AttachedClient, Blocking
from staleflow.clients.attachment import detach
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.row_files import prompt_row
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.permissions import Role
from staleflow.net.transport import Transport
from staleflow.protocols.wire.messages import (
    Detach,
    GetOutcomes,
    Outcome,
    Outcomes,
    SubmitPrompts,
    SubmitPromptsReply,
)
from staleflow.protocols.wire.messages.prompts import MAX_ROWS

Row = Mapping[str, Any]
Part = list[dict[str, Any]]

MAX_ID_BYTES = 180
"""Maximum size of the id of a submission: each of its parts appends its number."""
PART_BYTES = 4 << 20
"""Size of the rows beyond which a submission is sent in several parts."""
POLL_MS = 10_000
"""Maximum time that the scheduler keeps a request for outcomes."""
SCHEDULER_TIMEOUT_S = 60.0
"""Silence of the scheduler after which the run is considered over."""


class PromptError(ValueError):
    """A row is none that the run can use; the text names the row, the value and what is allowed. Nothing was sent."""


class AsyncPromptClient(AttachedClient):
    """A source of prompts for a run with ``prompts.submitted``. Use it with ``async with``, in one event loop.

    Several clients may submit to one run, under different names. ``close`` leaves the run; the rows stay.
    """

    def __init__(
        self,
        run: Path | str,
        *,
        name: str = "prompts",
        timeout_s: float = ATTACH_TIMEOUT_S,
        transport: Transport | None = None,
    ) -> None:
        """``run``: its directory, or its scheduler's address. ``timeout_s``: of attaching. ``transport``: with the key
        of role ``prompts``; default: the run's, or the key named by STALEFLOW_KEY."""
        super().__init__(run, Role.PROMPTS, name=name, timeout_s=timeout_s, transport=transport)
        self._refuses = False
        """The run takes no more rows, because it drains or is over."""
        self._over = False
        """No further outcome can come."""

    async def _open(self) -> None:
        await self._attach("prompts")
        self._stack.push_async_callback(detach, self._scheduler, Detach(worker=self._me, why="closed"))
        if not self.config.prompts.submitted:
            raise ConfigError("prompts.submitted", False, "the run must be started with true, so that clients submit")

    @property
    def ended(self) -> bool:
        """True once a call has shown that the run drains or is over."""
        return self._refuses or self._over

    async def submit(self, rows: Iterable[Row], *, id: str = "", timeout_s: float | None = None) -> list[int]:
        """Append rows to the prompts of the run; return their numbers once they are durable: fewer if the run has
        ``ended``.

        While ``prompts.max_pending`` rows are pending it waits, at most ``timeout_s`` for each of its parts, then it
        raises ``Unavailable``. A repeated call with the same ``id`` and rows has no further effect, whatever failed
        before; an id is recognized for the next 16,384 parts of up to 1,024 rows.

        Raise ``PromptError`` for a row that the run cannot use, and ``Refused`` if ``finish`` was called.
        """
        return await self._submit(rows, id, timeout_s, last=False)

    async def finish(self, rows: Iterable[Row] = (), *, id: str = "", timeout_s: float | None = None) -> list[int]:
        """Append the last rows: no client submits any after them, and the run ends with them. As ``submit``."""
        return await self._submit(rows, id, timeout_s, last=True)

    async def outcomes(self, since: int = 0, *, at_most: int = 1000, timeout_s: float | None = None) -> list[Outcome]:
        """Return the first outcomes after number ``since``, at least one; none after ``timeout_s``, or once the run is
        over.

        The run keeps its newest 65,536 outcomes. A gap in the numbers shows that others were deleted.
        """
        if at_most < 1:
            raise ConfigError("at_most", at_most, "it must be at least 1")
        wait_ms = POLL_MS if timeout_s is None else min(round(timeout_s * 1000), POLL_MS)
        left_s = timeout_s
        while not self._over:
            try:
                reply = await self._scheduler.ask(
                    GetOutcomes(since=since, most=at_most, wait_ms=wait_ms), Outcomes, timeout_s=SCHEDULER_TIMEOUT_S
                )
            except Unavailable:
                self._over = True
                break
            except Refused as refused:
                if not refused.is_over:
                    raise
                self._over = True
                break
            self._over = reply.ended
            if reply.outcomes:
                return reply.outcomes
            if left_s is not None and (left_s := left_s - wait_ms / 1000) <= 0:
                break
        return []

    async def _submit(self, rows: Iterable[Row], id: str, timeout_s: float | None, *, last: bool) -> list[int]:
        if len(id.encode()) > MAX_ID_BYTES:
            raise ConfigError("id", id, f"it must have at most {MAX_ID_BYTES} bytes")
        name = id or secrets.token_hex(8)
        given: list[object] = list(rows)
        parts = list(self._parts([dict(cast(Row, row)) if isinstance(row, Mapping) else row for row in given]))
        numbers = list[int]()
        for place, part in enumerate(parts):
            request = SubmitPrompts(id=f"{name}/{place}", rows=part, last=last and place == len(parts) - 1)
            try:
                reply = await self._scheduler.ask(request, SubmitPromptsReply, timeout_s=timeout_s)
            except Refused as refused:
                if not refused.is_over:
                    raise
                self._refuses = True
                break
            numbers += range(reply.first, reply.first + len(part))
        return numbers

    def _parts(self, rows: Sequence[object]) -> Iterator[Part]:
        """Yield the rows in parts that the scheduler accepts; one empty part if there are none."""
        prompts = self.config.prompts
        most_rows = min(MAX_ROWS, prompts.max_pending)
        sizes = [self._checked(place, row) for place, row in enumerate(rows)]
        part, nbytes = list[dict[str, Any]](), 0
        for row, size in zip(rows, sizes, strict=True):
            if part and (len(part) == most_rows or nbytes + size > PART_BYTES):
                yield part
                part, nbytes = [], 0
            part.append(cast(dict[str, Any], row))
            nbytes += size
        if part or not rows:
            yield part

    def _checked(self, place: int, row: object) -> int:
        """Return the size of a row. Raise ``PromptError`` unless the run can use it."""
        prompts = self.config.prompts
        try:
            columns, chat_template = prompts.columns, prompts.chat_template
            _, encoded = prompt_row("row", "", f"row {place}", row, columns, chat_template=chat_template)
        except ConfigError as error:
            raise PromptError(error.allowed) from error
        if len(encoded) > prompts.max_row_bytes:
            allowed = f"prompts.max_row_bytes allows {prompts.max_row_bytes}"
            raise PromptError(f"row {place} has {len(encoded)} bytes; {allowed}")
        return len(encoded)


class PromptClient(Blocking[AsyncPromptClient]):
    """The blocking form of ``AsyncPromptClient``. Use it with ``with``, in one thread."""

    def __init__(
        self,
        run: Path | str,
        *,
        name: str = "prompts",
        timeout_s: float = ATTACH_TIMEOUT_S,
        transport: Transport | None = None,
    ) -> None:
        """As ``AsyncPromptClient``."""
        super().__init__(AsyncPromptClient(run, name=name, timeout_s=timeout_s, transport=transport), "prompt client")

    @property
    def ended(self) -> bool:
        """True once a call has shown that the run drains or is over."""
        return self._client.ended

    def submit(self, rows: Iterable[Row], *, id: str = "", timeout_s: float | None = None) -> list[int]:
        """As ``AsyncPromptClient.submit``."""
        return self._wait(self._client.submit(rows, id=id, timeout_s=timeout_s))

    def finish(self, rows: Iterable[Row] = (), *, id: str = "", timeout_s: float | None = None) -> list[int]:
        """As ``AsyncPromptClient.finish``."""
        return self._wait(self._client.finish(rows, id=id, timeout_s=timeout_s))

    def outcomes(self, since: int = 0, *, at_most: int = 1000, timeout_s: float | None = None) -> list[Outcome]:
        """As ``AsyncPromptClient.outcomes``."""
        return self._wait(self._client.outcomes(since, at_most=at_most, timeout_s=timeout_s))
