"""A judge: another model behind an OpenAI-compatible endpoint scores each completion.

``run = "staleflow.examples.stages.judge:judge"``, ``makes = ["score"]``. The judge is asked once for each sample,
concurrently, with the time limits and retries of the ``openai`` package (extra ``judge``). A reply that is cut off or
has no plain score fails the call for the group; the stage retries it ``retries`` times.
"""

import asyncio
import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from staleflow.clients.user_code.group import Group
from staleflow.configs.loading.extras import install

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
_SCORE = re.compile(
    r"[ *]*(?:(?:score|rating)[ *]*:?[ *]*)?(-?\d*\.?\d+)(?:[ *]*\(?(?:/|(?:out )?of)[ *]*(\d*\.?\d+)\)?)?[ *.]*",
    re.IGNORECASE,
)
"""A whole line: a number, and what it is out of where that is said."""


@dataclass(frozen=True)
class Endpoint:
    """Endpoint and options of the judge."""

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
    """``score``, a value a sample, from 0 to 1: the judge's number over ``best``, or the fraction that it says.

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
        message = reply.choices[0].message.content or ""
        if reply.choices[0].finish_reason == "length":
            raise ValueError(f"the judge was cut off at {message[-80:]!r}; it needs more than max_tokens {max_tokens}")
        return score_of(message, best)

    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(one(completion)) for completion in group.completions]
    return {"score": [task.result() for task in asking]}


def score_of(reply: str, best: float) -> float:
    """The last line that is a score and nothing else: the number over ``best``, or the fraction of an "8/10".

    ``ValueError`` for a reply without such a line, and for a score below 0 or above its scale.
    """
    scores = [result for line in reply.splitlines() if (result := _SCORE.fullmatch(line.strip()))]
    if scores:
        number, most = float(scores[-1][1]), float(scores[-1][2] or best)
        if most and 0.0 <= number <= most:
            return number / most
    raise ValueError(f"the judge said {reply[-80:]!r}, which is not one score from 0 to {best:g} on a line of its own")
