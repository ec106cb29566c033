"""Waiting for something that another task or thread brings about."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Return once ``condition()`` is true; ``TimeoutError`` when it is not in time."""
    async with asyncio.timeout(seconds):
        for _ in iter(lambda: bool(condition()), True):
            await asyncio.sleep(0.002)
