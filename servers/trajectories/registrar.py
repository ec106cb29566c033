"""Report state changes of groups to the scheduler: in batches, in order, one batch in flight.

Waits while the scheduler is unreachable. A rejected message (the run is over, a key is currently not allowed) leaves
its operations without a result, so it must not make the shard forget any payload.
"""

import asyncio
from collections.abc import Callable

from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Op, Operations, PushItem, RegisterReject, Result, Results

BATCH = 256
"""Maximum number of operations in one message."""
BUSY_RETRY_INTERVAL_S = 0.5
"""Retry interval of an operation that the scheduler returned ``BUSY`` for."""

Then = Callable[[Result], None]
_CAUSED_BY_ONE = (Code.OVERSIZE, Code.MALFORMED)
"""Rejections of a whole message that a single operation can cause. Halving the batch isolates that operation."""


class NotDelivered(Result, frozen=True, kw_only=True):
    """The scheduler rejected the message, so the ledger has not seen the operation."""


class Registrar:
    """Send each operation until the scheduler returns a final result, then call its ``then`` once."""

    def __init__(self, scheduler: Client) -> None:
        self._scheduler = scheduler
        self._pending: list[tuple[Op, Then]] = []
        self._ready = asyncio.Event()
        self._open = 0
        self._rejects = 0
        """Number of open operations that report rejected pushes. No payload of the shard depends on them."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._answered = asyncio.Event()

    def __len__(self) -> int:
        """Number of operations without a final result, reports of rejected pushes excluded."""
        return self._open - self._rejects

    def add(self, op: Op, then: Then) -> None:
        """Send this operation with the next batch."""
        self._open += 1
        self._rejects += isinstance(op, RegisterReject)
        self._idle.clear()
        self._enqueue(op, then)

    async def wait_below(self, limit: int) -> None:
        """Return once fewer than ``limit`` operations are open. Lets a caller with very many add them gradually."""
        while self._open >= limit:
            self._answered.clear()
            await self._answered.wait()

    async def idle(self) -> None:
        """Return once every operation has its final result."""
        await self._idle.wait()

    def _enqueue(self, op: Op, then: Then) -> None:
        self._pending.append((op, then))
        self._ready.set()

    async def run(self) -> None:
        """Send batches until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._ready.wait()
            batch, self._pending = self._pending[:BATCH], self._pending[BATCH:]
            if not self._pending:
                self._ready.clear()
            # One batch in flight at a time: the ledger must see a group's operations in order.
            results = await self._results([op for op, _ in batch])
            for (op, then), result in zip(batch, results, strict=True):
                if result.code is Code.BUSY:
                    loop.call_later(BUSY_RETRY_INTERVAL_S, self._enqueue, op, then)
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
        except Refused as refusal:
            if refusal.code in _CAUSED_BY_ONE and len(ops) > 1:
                half = len(ops) // 2
                return await self._results(ops[:half]) + await self._results(ops[half:])
            kind = Result if refusal.code in _CAUSED_BY_ONE else NotDelivered
            return [kind(code=refusal.code, detail=refusal.detail)] * len(ops)
        return answer.results


class PushRejects:
    """Report pushes that the shard rejected to the scheduler, so that the trace has a ``reject`` line for them.

    At most one report per worker and code is in flight; rejections in the meantime are counted into the next one. A
    worker that sends only garbage therefore cannot fill the queue to the scheduler.
    """

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar
        self._pending: dict[tuple[WorkerId, Code], RegisterReject | None] = {}
        """Next report per worker and code whose previous report is in flight."""

    def note(self, item: PushItem, code: Code) -> None:
        """Report one rejected push."""
        key = item.worker, code
        reject = RegisterReject(group=item.group, lease=item.lease, worker=item.worker, code=code)
        if key not in self._pending:
            self._send(reject)
        elif (waiting := self._pending[key]) is None:
            self._pending[key] = reject
        else:
            self._pending[key] = RegisterReject(
                group=item.group, lease=item.lease, worker=item.worker, code=code, count=waiting.count + 1
            )

    def _send(self, reject: RegisterReject) -> None:
        key = reject.worker, reject.code
        self._pending[key] = None

        def sent(_: Result) -> None:
            following = self._pending.pop(key)
            if following is not None:
                self._send(following)

        self._registrar.add(reject, sent)
