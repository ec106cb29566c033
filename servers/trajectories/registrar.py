"""Tells the scheduler what became of groups: in batches, in order, one batch under way.

Waits for a scheduler that is away. A refusal of a whole message (the run is over, a key is not allowed at present) is
no answer to the operations in it: nothing may be forgotten because of one.
"""

import asyncio
from collections.abc import Callable

from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import Op, Operations, RegisterReject, Result, Results

BATCH = 256
"""Operations of one message."""
BUSY_S = 0.5
"""An operation that the scheduler has no room for is told again after this long."""

Then = Callable[[Result], None]
_TOGETHER = (Code.OVERSIZE, Code.MALFORMED)
"""What one operation may bring on all of its message."""


class Untold(Result, frozen=True, kw_only=True):
    """The ledger was not asked: the scheduler would not hear the message."""


class Registrar:
    """Each operation is told until there is an answer, and then ``then`` is called, once."""

    def __init__(self, scheduler: Client) -> None:
        self._scheduler = scheduler
        self._waiting: list[tuple[Op, Then]] = []
        self._there = asyncio.Event()
        self._open = 0
        self._rejects = 0
        """Of these, reports of refused pushes: nothing of the shard depends on them."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._answered = asyncio.Event()

    def __len__(self) -> int:
        """Operations without a final answer that the ledger is to apply."""
        return self._open - self._rejects

    def add(self, op: Op, then: Then) -> None:
        """Tell this one with the next batch."""
        self._open += 1
        self._rejects += isinstance(op, RegisterReject)
        self._idle.clear()
        self._again(op, then)

    async def fewer(self, than: int) -> None:
        """Returns once fewer operations than so many have no final answer: for whoever has very many, one at a time."""
        while self._open >= than:
            self._answered.clear()
            await self._answered.wait()

    async def idle(self) -> None:
        """Returns once every operation has its final answer."""
        await self._idle.wait()

    def _again(self, op: Op, then: Then) -> None:
        self._waiting.append((op, then))
        self._there.set()

    async def run(self) -> None:
        """Work until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._there.wait()
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            if not self._waiting:
                self._there.clear()
            results = await self._results([op for op, _ in batch])
            for (op, then), result in zip(batch, results, strict=True):
                if result.code is Code.BUSY:
                    loop.call_later(BUSY_S, self._again, op, then)
                    continue
                self._open -= 1
                self._rejects -= isinstance(op, RegisterReject)
                then(result)
            self._answered.set()
            if not self._open:
                self._idle.set()

    async def _results(self, ops: list[Op]) -> list[Result]:
        try:
            answer = await self._scheduler.ask(Operations(ops=ops), Results, timeout_s=None)
        except Refused as no:
            if no.code in _TOGETHER and len(ops) > 1:
                half = len(ops) // 2
                return await self._results(ops[:half]) + await self._results(ops[half:])
            kind = Result if no.code in _TOGETHER else Untold
            return [kind(code=no.code, detail=no.detail)] * len(ops)
        return answer.results
