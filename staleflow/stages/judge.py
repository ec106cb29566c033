"""A judge: another model, behind an OpenAI-compatible endpoint, says how good each completion is.

``run = "staleflow.stages.judge:judge"``, ``makes = ["score"]``. Asks once for every sample, side by side, with time
limits and retries of the ``openai`` package (extra ``judge``); what stays without a number fails the group's call,
which the stage tries again ``retries`` times.
"""

import asyncio
import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from staleflow.clients.stage.group import Group
from staleflow.configs.extras import install

try:
    from openai import AsyncOpenAI
except ImportError as error:
    raise ImportError(f"it needs the package openai: {install('judge')}") from error

QUESTION = """\
Rate the answer to the question below from 0 (useless) to {best} (could not be better). Reply with the number alone.

Question:
{prompt}

Answer:
{completion}
"""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Endpoint:
    """Where to ask, and how."""

    base_url: str
    key_variable: str
    timeout_s: float
    retries: int
    at_once: int


@cache
def _opened(endpoint: Endpoint) -> tuple[AsyncOpenAI, asyncio.Semaphore]:
    """One client of a process, which keeps its connections, and the room for calls under way."""
    client = AsyncOpenAI(
        base_url=endpoint.base_url,
        api_key=os.environ.get(endpoint.key_variable) or "none",
        timeout=endpoint.timeout_s,
        max_retries=endpoint.retries,
    )
    return client, asyncio.Semaphore(endpoint.at_once)


async def judge(
    group: Group,
    *,
    base_url: str,
    model: str,
    key_variable: str = "OPENAI_API_KEY",
    question: str = QUESTION,
    best: float = 10.0,
    max_tokens: int = 16,
    timeout_s: float = 20.0,
    retries: int = 3,
    at_once: int = 16,
) -> dict[str, Any]:
    """``score``, a value a sample: the judge's number over ``best``, from 0 to 1.

    ``key_variable`` names the environment variable with the key. ``question`` may have {prompt}, {completion}, {best}
    and the columns of the prompt's row. ``timeout_s`` and ``retries`` are a call's; overload (429) and errors of the
    server are tried again with growing pauses. ``at_once`` calls of this process are under way, the others wait.
    """
    client, room = _opened(Endpoint(base_url, key_variable, timeout_s, retries, at_once))

    async def one(completion: str) -> float:
        asked = question.format(**{**group.row, "prompt": group.prompt, "completion": completion, "best": f"{best:g}"})
        async with room:
            reply = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": asked}], max_tokens=max_tokens, temperature=0.0
            )
        return score_of(reply.choices[0].message.content or "", best)

    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(one(completion)) for completion in group.completions]
    return {"score": [task.result() for task in asking]}


def score_of(reply: str, best: float) -> float:
    """The last number of a reply over ``best``, from 0 to 1. ``ValueError`` for a reply without one."""
    numbers = _NUMBER.findall(reply)
    if not numbers:
        raise ValueError(f"the judge said {reply!r:.80}, which has no number")
    return min(max(float(numbers[-1]) / best, 0.0), 1.0)
