"""Waiting for a condition that another task or thread fulfils."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return once ``condition()`` is true; raise ``TimeoutError`` after the time limit."""
    async with asyncio.timeout(seconds):
        for _ in iter(lambda: bool(condition()), True):
            await asyncio.sleep(0.002)
