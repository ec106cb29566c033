"""A pace for vLLM's engine core, which is another process and would get ahead of a test that stands still."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest_asyncio

from tests.clients.rollout.engines.vllm.pace import FOLDER, STEP

INTERVAL_S = 0.005


@pytest_asyncio.fixture(loop_scope="module")
async def paced() -> AsyncIterator[None]:
    """Let the engine core make each step only once this loop has permitted it."""

    async def permit() -> None:
        while True:
            STEP.touch()
            await asyncio.sleep(INTERVAL_S)

    FOLDER.mkdir()
    permitting = asyncio.ensure_future(permit())
    yield
    permitting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await permitting
    STEP.unlink(missing_ok=True)
    FOLDER.rmdir()
