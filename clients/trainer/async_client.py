"""``TrainerClient`` for asyncio: its calls run one after another in a thread, beside the event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from staleflow.clients.trainer.backends.base import Published
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.net.transport import Transport
from staleflow.protocols.consistency.ids import GroupId, Lineage, Step, Version
from staleflow.protocols.wire.messages import JoinReply, ModelLimits

T = TypeVar("T")


class AsyncTrainerClient:
    """One trainer of one run. Use it with ``async with``; one call at a time.

    Cancelling a call interrupts the client: ``batches`` then ends, and only ``finished`` and ``close`` have an effect.
    """

    def __init__(
        self,
        scheduler: str,
        *,
        name: str = "trainer",
        config_sha: str = "",
        model: ModelLimits | None = None,
        transport: Transport | None = None,
    ) -> None:
        """As ``TrainerClient``; ``model``: limits of the model, if known."""
        self._client = TrainerClient(scheduler, name=name, config_sha=config_sha, transport=transport)
        self._client.model = model or ModelLimits()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trainer calls")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def version(self) -> Version:
        """Version of the trainer's weights, as known to the run."""
        return self._client.version

    @property
    def drained(self) -> str:
        """Why ``batches`` ended early if the run was drained."""
        return self._client.drained

    async def join(self, lineage: Lineage, version: Version) -> JoinReply:
        """As ``TrainerClient.join``."""
        return await self._call(self._client.join, lineage, version)

    async def publish_initial(self, weights: Mapping[str, Any] | Published) -> None:
        """As ``TrainerClient.publish_initial``."""
        await self._call(self._client.publish_initial, weights)

    async def batches(self, steps: int) -> AsyncGenerator[TrainBatch]:
        """As ``TrainerClient.batches``."""
        batches = self._client.batches(steps)
        try:
            while (batch := await self._call(lambda: next(batches, None))) is not None:
                yield batch
        finally:
            await self._call(batches.close)

    async def commit(self, weights: Mapping[str, Any] | Published) -> Version:
        """As ``TrainerClient.commit``."""
        return await self._call(self._client.commit, weights)

    async def begin_commit(self, weights: Mapping[str, Any] | Published) -> Version:
        """As ``TrainerClient.begin_commit``."""
        return await self._call(self._client.begin_commit, weights)

    async def before_update(self) -> None:
        """As ``TrainerClient.before_update``."""
        await self._call(self._client.before_update)

    async def finish_commit(self) -> Version:
        """As ``TrainerClient.finish_commit``."""
        return await self._call(self._client.finish_commit)

    async def commit_external(self, digest: str) -> Version:
        """As ``TrainerClient.commit_external``."""
        return await self._call(self._client.commit_external, digest)

    async def quarantine(self, groups: Sequence[GroupId], why: str) -> None:
        """As ``TrainerClient.quarantine``."""
        await self._call(self._client.quarantine, groups, why)

    async def checkpointed(self, lineage: Lineage, version: Version, *, keep: int = 1) -> Version | None:
        """As ``TrainerClient.checkpointed``."""
        return await self._call(lambda: self._client.checkpointed(lineage, version, keep=keep))

    async def metrics(self, step: Step, values: Mapping[str, float]) -> None:
        """As ``TrainerClient.metrics``."""
        await self._call(self._client.metrics, step, values)

    async def finished(self, error: str = "") -> None:
        """As ``TrainerClient.finished``."""
        await self._call(self._client.finished, error)

    async def close(self) -> None:
        """Leave the run. Calling it again has no effect."""
        if not self._client.closed:
            await self._call(self._client.close)
            self._executor.shutdown(wait=False)

    async def _call(self, function: Callable[..., T], *given: Any) -> T:
        call = asyncio.get_running_loop().run_in_executor(self._executor, function, *given)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            self._client.interrupt()
            await asyncio.wait((call,))
            raise
