"""Engines of a user for the tests. Rollout workers load this file by path."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.clients.rollout.engines.base import EngineStats, Request, TokenSegment, Trajectory
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish


class Echo:
    """Repeat the prompt after ``offset`` is added to each token. It has an event loop's form and no thread.

    ``wait_s``: duration of each request.
    """

    def __init__(self, directory: Path, config: Config, *, offset: int = 0, wait_s: float = 0.0) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offset, self._wait_s = offset, wait_s
        self._loaded = (Lineage(0), Version(-1))
        self._generated = 0

    def encode(self, prompt: str) -> Any:
        return np.arange(3, dtype=np.int32)

    async def generate(self, request: Request) -> Trajectory:
        lineage, version = self._loaded
        await asyncio.sleep(self._wait_s)
        tokens = request.prompt_ids + np.int32(self._offset)
        logprobs = np.full(len(tokens), -1.0, np.float32)
        segment = TokenSegment(lineage=lineage, version=version, token_ids=tokens, logprobs=logprobs)
        self._generated += len(tokens)
        return Trajectory(id=request.id, segments=(segment,), finish=Finish.STOP)

    def interrupt(self, request: int, least: int = 1) -> None: ...

    def abort(self, request: int) -> None: ...

    async def load(self, tensors: Mapping[str, Any], lineage: Lineage, version: Version) -> None:
        self._loaded = (lineage, version)

    def stats(self) -> EngineStats:
        return EngineStats(generated_tokens=self._generated)

    def busy_s(self) -> float:
        return 0.0

    def tokens_per_s(self) -> float:
        return 0.0

    def stuck_s(self) -> float:
        return 0.0

    async def close(self) -> None: ...


class Stepped(SimulatedEngine):
    """An engine that its owner steps."""

    def __init__(self, directory: Path, config: Config) -> None:
        super().__init__(config.rollout.simulated, slots=config.rollout.max_inflight, seed=config.seed)


async def opened(directory: Path, config: Config) -> Echo:
    """Return an engine after some waiting."""
    await asyncio.sleep(0)
    return Echo(directory, config)


class Silent:
    """Not an engine."""

    def __init__(self, directory: Path, config: Config) -> None: ...

    def generate(self) -> None: ...
