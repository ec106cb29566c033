"""Base of the trajectory servers, the parameter server and the relays: attach to the scheduler and serve until stopped.

The scheduler stores each attachment, so a server sends ``Attach`` once; server and scheduler may start in either order.
On shutdown, replies in progress have ``SHUTDOWN_TIMEOUT_S`` to finish, then the remaining tasks are cancelled.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.net.client import Client
from staleflow.net.endpoint import Call, Endpoint
from staleflow.net.errors import Refused, RunOver
from staleflow.net.transport import SOCKETS, Transport
from staleflow.process import readiness
from staleflow.process.daemon import Stop
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.messages import Attach, AttachReply, Reply
from staleflow.store.disk_errors import Scarce

SHUTDOWN_TIMEOUT_S = 3.0
"""Time that running tasks have to finish during shutdown."""


class Tasks:
    """Background tasks of a server. A task that fails ends the process; all tasks are cancelled on shutdown."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run ``work`` in the background."""
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def drain(self) -> None:
        """Wait for the running tasks, at most ``SHUTDOWN_TIMEOUT_S``."""
        if self._running:
            await asyncio.wait(self._running, timeout=SHUTDOWN_TIMEOUT_S)

    def cancel(self) -> None:
        """Cancel the running tasks, including those started during ``drain``."""
        for task in self._running:
            task.cancel()


Answer = Reply | tuple[Reply, Sequence[Data]]
"""A reply, or a reply and its frames."""
Handled = Answer | Callable[[], Coroutine[Any, Any, Answer]] | None
"""An answer, a function whose coroutine returns it, or None if the call is kept and answered later. A function, because
a coroutine whose task is cancelled before its first step would never be awaited."""


class Service:
    """Base of a server that ``serve_attached`` runs. Owned by one event loop."""

    def __init__(self, tasks: Tasks, *, retry_ms: int) -> None:
        """``retry_ms``: delay that is sent with a ``BUSY`` reply."""
        self._tasks = tasks
        self._retry_ms = retry_ms

    def handle(self, call: Call) -> Handled:
        """Handle a request by its type. May raise ``Refused``, ``ProtocolError`` or ``Scarce``."""
        raise NotImplementedError

    def on_call(self, call: Call) -> None:
        """Serve one request. Coroutines run as tasks, so the loop never waits for them."""
        try:
            answer = self.handle(call)
        except (Refused, ProtocolError, Scarce) as error:
            self._refuse(call, error)
            return
        if callable(answer):
            self._tasks.start(self._reply_later(call, answer))
        elif answer is not None:
            _reply(call, answer)

    async def _reply_later(self, call: Call, answer: Callable[[], Coroutine[Any, Any, Answer]]) -> None:
        try:
            _reply(call, await answer())
        except (Refused, ProtocolError, Scarce) as error:
            self._refuse(call, error)

    def _refuse(self, call: Call, error: Refused | ProtocolError | Scarce) -> None:
        if isinstance(error, Scarce):
            error = Refused(Code.BUSY, str(error))
        call.refuse(error.code, error.detail, retry_after_ms=self._retry_ms if error.code is Code.BUSY else 0)

    def on_drained(self) -> None:
        """Finish the requests of one drain of the socket, such as by one commit for all of them."""

    def on_gone(self, peer: str) -> None:
        """Release what a lost peer had."""

    async def work(self) -> None:
        """Do the work that needs the scheduler; started once this server is attached, runs until cancelled."""

    def drain(self) -> None:
        """Accept no new requests; reply to the requests that are only waiting."""


def _reply(call: Call, answer: Answer) -> None:
    if isinstance(answer, tuple):
        call.reply(*answer)
    else:
        call.reply(answer)


async def serve_attached(
    stop: Stop,
    *,
    bind: str,
    scheduler: Client,
    hello: Callable[[str], Attach],
    make: Callable[[Tasks], Service],
    on_attached: Callable[[AttachReply], None] | None = None,
    transport: Transport = SOCKETS,
) -> None:
    """Serve ``make(tasks)`` at ``bind`` until stopped.

    ``hello`` receives the bound address and returns the ``Attach`` to send; ``on_attached`` receives the reply.
    """
    try:
        async with _config_errors(), asyncio.TaskGroup() as group:
            tasks = Tasks(group)
            service = make(tasks)
            endpoint = Endpoint(
                bind,
                on_call=service.on_call,
                on_drained=service.on_drained,
                on_gone=service.on_gone,
                transport=transport,
            )
            group.create_task(endpoint.serve())
            working = group.create_task(_work(scheduler, hello(endpoint.address), service, on_attached))
            await stop.wait()
            # The endpoint closes after the tasks have drained: replies in progress still need it.
            service.drain()
            await tasks.drain()
            working.cancel()
            endpoint.close()
            tasks.cancel()
    finally:
        scheduler.close()


async def _work(
    scheduler: Client, hello: Attach, service: Service, on_attached: Callable[[AttachReply], None] | None
) -> None:
    hello = msgspec.structs.replace(hello, slot=readiness.slot())
    try:
        attached = await scheduler.ask(hello, AttachReply, timeout_s=None)
    except Refused as no:
        if no.is_over:
            raise RunOver from no
        raise ConfigError("scheduler", scheduler.address, f"it refuses {hello.name}: {no.detail or no.code}") from no
    readiness.report_attached()
    if on_attached is not None:
        on_attached(attached)
    await service.work()


@asynccontextmanager
async def _config_errors() -> AsyncGenerator[None]:
    """Raise a ``ConfigError`` or ``RunOver`` of any task as itself instead of inside an exception group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException | None = group.subgroup((ConfigError, RunOver))
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None:
            raise
        raise error from None
