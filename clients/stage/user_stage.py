"""A stage defined by the user: its function is called with every group, in a child process."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

from staleflow.clients.stage.reward import completions
from staleflow.clients.stage.worker import Failed, StageGroup, StageOutcome
from staleflow.clients.texts import Decode
from staleflow.clients.user_code import pipe
from staleflow.clients.user_code.group_child import noun_of
from staleflow.clients.user_code.process import Program
from staleflow.clients.user_code.runner import CallFailed, CallRunner
from staleflow.configs.schema import Stage as StageSettings
from staleflow.configs.stages import Node
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.tensors import pack, unpack


class UserStage:
    """Compute the columns that its function returns. Groups of an ``async def`` run concurrently, others one by one."""

    together: ClassVar[bool] = False

    def __init__(self, calls: CallRunner, decode: Decode) -> None:
        self._calls = calls
        self._decode = decode

    @property
    def calls(self) -> int:
        """Maximum number of concurrent calls of the function."""
        return self._calls.calls

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._one(group)) for group in groups]
        return [task.result() for task in running]

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        """Do nothing: the function is not notified."""

    async def _one(self, group: StageGroup) -> StageOutcome:
        texts, payload = self._decode(completions(group.payload)), pack(group.payload.to_arrays())

        def call(number: int) -> pipe.GroupCall:
            return pipe.GroupCall(id=number, row=group.row, completions=texts, payload=payload)

        try:
            return dict(unpack((await self._calls.answer(call)).packed))
        except (CallFailed, ProtocolError) as failed:
            return Failed(str(failed))


@asynccontextmanager
async def user_stage(settings: StageSettings, node: Node, decode: Decode) -> AsyncGenerator[UserStage]:
    """Open the stage and its process. Raise ``ConfigError`` if ``run`` cannot be loaded."""
    load = pipe.Load(
        run=settings.run,
        timeout_s=settings.timeout_s,
        options=settings.options,
        stage=settings.name,
        makes=list(node.makes),
    )
    program = Program(
        module="staleflow.clients.user_code.group_child",
        key=f"stage {settings.name}",
        noun=noun_of(settings.name),
        load=load,
    )
    calls = CallRunner(program, retries=settings.retries, concurrency=settings.concurrency)
    try:
        await calls.start()
        yield UserStage(calls, decode)
    finally:
        await calls.close()
