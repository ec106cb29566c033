"""Valid and faulty user-defined stages for the tests. Child processes load this file by path."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.clients.user_code.group import Group


def both(group: Group, *, weight: float) -> dict[str, Any]:
    """Return one value per sample and one per token, from all columns of a group."""
    given = group.columns["reward/reward"]
    return {
        "score": [weight * len(text) + float(reward) for text, reward in zip(group.completions, given, strict=True)],
        "values": [logprobs * sampled for logprobs, sampled in zip(group.logprobs, group.sampled, strict=True)],
    }


def length(group: Group) -> dict[str, Any]:
    return {"score": [len(ids) for ids in group.token_ids]}


async def slowly(group: Group, *, seconds: float = 0.3) -> dict[str, Any]:
    await asyncio.sleep(seconds)
    return {"score": np.zeros(group.num_samples)}


def returns(group: Group, *, what: Any) -> Any:
    return what


def too_few_at_first(group: Group, *, marker: str) -> dict[str, Any]:
    if not Path(marker).exists():
        Path(marker).touch()
        return {"score": [0.0]}
    return {"score": [0.0] * group.num_samples}


def hangs(group: Group) -> dict[str, Any]:
    time.sleep(3600)
    return {}


def held(seen: Path, me: str) -> bool:
    return len([*seen.glob(f"{me}-*")]) > 16 and (seen / "hold").exists()


async def meets(group: Group, *, me: str, other: str, folder: str) -> dict[str, Any]:
    """Wait a moment until the other stage is in its call on a group of the same prompt; record whether it was.

    After the first groups, it waits while the file ``hold`` is in the folder.
    """
    seen = Path(folder)
    (seen / f"{me}-{group.prompt}").touch()
    while held(seen, me):  # noqa: ASYNC110 another process removes the file
        await asyncio.sleep(0.02)
    for _ in range(200):
        if (seen / f"{other}-{group.prompt}").exists():
            (seen / f"{me}_met-{group.prompt}").touch()
            break
        await asyncio.sleep(0.01)
    return {"score": [float(len(ids)) for ids in group.token_ids]}


def spread(prompt: str, completion: str, *, score: float, **columns: Any) -> float:
    return score
