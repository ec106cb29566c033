"""A run whose servers the test starts; all servers and clients end with the test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers.running import Run


@pytest.fixture
async def make_run(short_dir: Path) -> AsyncIterator[Callable[..., Run]]:
    runs: list[Run] = []
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    def make(**sections: dict[str, Any] | list[dict[str, Any]]) -> Run:
        runs.append(Run(short_dir / "run", **sections))
        return runs[-1]

    yield make
    async with contextlib.AsyncExitStack() as closing:  # closes every run even if one close fails
        for run in runs:
            closing.push_async_callback(run.close)
    assert failures == []  # exceptions raised in tasks that are not awaited


@pytest.fixture
async def run(make_run: Callable[..., Run]) -> Run:
    """Scheduler, one trajectory server and the parameter server, all running."""
    run = make_run()
    run.scheduler()
    run.trajectories()
    run.parameters()
    return run
