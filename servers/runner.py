"""What the trajectory servers and the parameter server have in common: attached to the scheduler until stopped.

The scheduler remembers who attached, so hello is said once; whoever of the two starts first waits for the other. Once
stopped, answers that are under way have ``GRACE_S`` to leave; then everything ends.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.net.client import Client
from staleflow.net.endpoint import Call, Endpoint
from staleflow.net.errors import Refused, RunOver
from staleflow.net.transport import SOCKETS, Transport
from staleflow.process import readiness
from staleflow.process.daemon import Stop
from staleflow.protocols.wire.messages import Attach, AttachReply

GRACE_S = 3.0


class Tasks:
    """Tasks of a server: one that fails ends the process; all are cancelled at the end."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run ``work`` beside everything else."""
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def drain(self) -> None:
        """Wait for what runs, at most ``GRACE_S``."""
        if self._running:
            await asyncio.wait(self._running, timeout=GRACE_S)

    def cancel(self) -> None:
        """End what runs, and what was begun while the rest was waited for."""
        for task in self._running:
            task.cancel()


class Service(Protocol):
    """What a server does."""

    def on_call(self, call: Call) -> None: ...
    def on_drained(self) -> None: ...
    def on_gone(self, peer: str) -> None: ...
    async def work(self) -> None:
        """Everything that is done once the scheduler knows this server; runs until cancelled."""

    def drain(self) -> None:
        """Take nothing new; answer what merely waits."""


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
    """Serve ``make(tasks)`` at ``bind`` until stopped. ``hello`` gets the bound address, ``on_attached`` the answer."""
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
    """A ``ConfigError`` or ``RunOver`` of any task leaves as itself and not as a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        found: BaseException | None = group.subgroup((ConfigError, RunOver))
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if found is None:
            raise
        raise found from None
