"""Bases of the public clients that attach to a run: one for asyncio, and a blocking one around any of them."""

import os
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from staleflow.clients.attachment import attach_within, locate
from staleflow.clients.background import LoopThread
from staleflow.configs.loading.load import from_json
from staleflow.configs.schema import Config
from staleflow.net.client import Client, worker_id
from staleflow.net.permissions import Role
from staleflow.net.transport import Transport
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Attach, AttachReply

T = TypeVar("T")

ATTACH_TIMEOUT_S = 60.0


class AttachedClient:
    """Base of the asyncio clients. A subclass attaches in ``_open``, and puts on ``_stack`` what its end must undo."""

    def __init__(
        self, run: Path | str, role: Role, *, name: str, timeout_s: float, transport: Transport | None
    ) -> None:
        """``run``: its directory, or its scheduler's address. ``timeout_s``: of attaching. ``transport``: default: with
        the run's key of ``role``, or the key named by STALEFLOW_KEY."""
        self.name = name
        self._address, self._transport = locate(run, role, transport)
        self._timeout_s = timeout_s
        self._stack = AsyncExitStack()
        self._config: Config | None = None
        self._me = WorkerId("")
        self._scheduler: Client

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _open(self) -> None:
        raise NotImplementedError

    async def _attach(self, role: str, *, stage: str = "", capacity: int = 0, parameters: bool = False) -> AttachReply:
        """Attach, and keep the configuration of the run. ``parameters``: wait for the parameter server, too."""
        self._me = worker_id(self.name)
        self._scheduler = self._client(self._address)
        request = Attach(worker=self._me, name=self.name, role=role, stage=stage, capacity=capacity, pid=os.getpid())
        attached = await attach_within(self._timeout_s, self._scheduler, request, parameters=parameters)
        self._config = from_json(attached.config)
        return attached

    def _client(self, address: str) -> Client:
        """Return a client of one server, which is closed at the end."""
        client = Client(address, worker=self._me, transport=self._transport)
        self._stack.callback(client.close)
        return client

    async def close(self) -> None:
        """Leave the run. Calling it again has no effect."""
        await self._stack.aclose()

    @property
    def config(self) -> Config:
        """Configuration of the run."""
        if self._config is None:
            raise RuntimeError("the client has not attached; use it with `async with`, or `with`")
        return self._config


C = TypeVar("C", bound=AttachedClient)


class Blocking(Generic[C]):
    """Base of the blocking clients: runs an asyncio client on an event loop in a thread of its own."""

    def __init__(self, client: C, kind: str) -> None:
        """``kind``: of the client, for the name of the thread."""
        self._client = client
        self._kind = kind
        self._thread: LoopThread | None = None

    def __enter__(self) -> Self:
        self._thread = LoopThread(f"{self._kind} {self._client.name}")
        try:
            self._wait(self._client.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the run. Calling it again has no effect."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.start(self._client.close()).result()
            thread.close(lambda: None)

    @property
    def config(self) -> Config:
        """Configuration of the run."""
        return self._client.config

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            work.close()
            raise RuntimeError("the client has not attached, or is closed; use it with `with`")
        return self._thread.result(work)
