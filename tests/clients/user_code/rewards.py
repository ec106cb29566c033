"""Valid and faulty reward functions for the tests of the runner. Child processes load this file by path."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def length(prompt: str, completion: str, **columns: Any) -> float:
    print("a reward may print")
    return float(len(completion))


def columns(prompt: str, completion: str, *, answer: str, weight: float) -> float:
    return weight if prompt + completion == answer else 0.0


async def slowly(prompt: str, completion: str) -> float:
    await asyncio.sleep(2.0)
    return float(completion)


async def stuck(prompt: str, completion: str) -> float:
    if completion == "exit":
        await asyncio.sleep(0.1)
        os._exit(5)
    if completion == "await":
        await asyncio.sleep(3600)
    if completion == "block":
        time.sleep(3600)  # noqa: ASYNC251 - the mistake that is tested
    await asyncio.sleep(0.3)
    return float(completion)


_under_way = 0


async def together(prompt: str, completion: str, *, folder: str) -> float:
    """Return the number of calls under way at this moment; the first hundred calls wait for one another."""
    global _under_way
    _under_way += 1
    most = _under_way
    met = Path(folder) / "met"
    while _under_way < 100 and not met.exists():
        await asyncio.sleep(0.01)
        most = max(most, _under_way)
    met.touch()
    await asyncio.sleep(0.01)
    _under_way -= 1
    return float(most)


_crowd = 0


async def crowd(prompt: str, completion: str) -> float:
    """Return 1 if eight calls were ever under way at once; return 0 if they were not after a while."""
    global _crowd, _under_way
    _under_way += 1
    for _ in range(1_000):
        _crowd = max(_crowd, _under_way)
        if _crowd >= 8:
            break
        await asyncio.sleep(0.01)
    _under_way -= 1
    return float(_crowd >= 8)


def hangs(prompt: str, completion: str) -> float:
    if completion == "hang":
        time.sleep(3600)
    return 1.0


def raises_or_hangs(prompt: str, completion: str, *, marker: str) -> float:
    if completion == "hang":
        Path(marker).touch()
        time.sleep(3600)
    if completion == "raise":
        raise ValueError("cannot judge it")
    return 1.0


def hangs_for_good(prompt: str, completion: str, *, marker: str) -> float:
    Path(marker).touch()
    time.sleep(3600)
    return 1.0


def hangs_once(prompt: str, completion: str, *, marker: str) -> float:
    if not Path(marker).exists():
        Path(marker).touch()
        time.sleep(3600)
    return 7.0


def hangs_in_c(prompt: str, completion: str, *, marker: str) -> float:
    Path(marker).touch()
    return float(re.match("(a+)+$", "a" * 32 + "b") is None)  # holds the interpreter for minutes


def starts_a_process(prompt: str, completion: str, *, marker: str) -> float:
    with subprocess.Popen(["sleep", "3600"]):
        Path(marker).touch()
    return 1.0


def raises(prompt: str, completion: str) -> float:
    raise ValueError(f"cannot judge {completion}")


def reads(prompt: str, completion: str) -> float:
    return float(json.loads(completion))


def picky(prompt: str, completion: str) -> float:
    if prompt.endswith("7"):
        raise ValueError(f"cannot judge {prompt}")
    return float(len(completion))


def dies(prompt: str, completion: str) -> float:
    os._exit(3)


def leaves(prompt: str, completion: str) -> float:
    sys.exit("a reward may not end the run")


def nan(prompt: str, completion: str) -> float:
    return float("nan")


def huge(prompt: str, completion: str) -> float:
    return 1e300


def text(prompt: str, completion: str) -> Any:
    return "good"


def process(prompt: str, completion: str) -> float:
    return float(os.getpid())


def reads_stdin(prompt: str, completion: str) -> float:
    return float(len(sys.stdin.read()))


def told(prompt: str, completion: str, *, other: float) -> float:
    return other


def by_trl(
    completions: list[str], prompts: list[str] | None = None, answer: list[str] | None = None, **kwargs: Any
) -> list[float | None]:
    """A function with TRL's signature. None: the sample has no reward of this kind."""
    assert prompts is not None
    assert answer is not None
    assert sorted(kwargs) == ["completion_ids", "completion_tokens", "finish_reason"]
    return [
        None if not text else float(prompt + text == wanted)
        for prompt, text, wanted in zip(prompts, completions, answer, strict=True)
    ]


def contents(completions: list[list[dict[str, str]]], prompts: list[Any]) -> list[float]:
    both = zip(prompts, completions, strict=True)
    return [float(prompt[-1]["content"] + text[0]["content"] == "ab") for prompt, text in both]


async def later(completions: list[str], completion_tokens: list[int], **columns: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(tokens) for tokens in completion_tokens]


def too_few(completions: list[str]) -> list[float]:
    return [1.0]


def one_number(completions: list[str]) -> float:
    return 1.0


def brief(prompt: str, completion: str, completion_tokens: int, finish_reason: str, **columns: Any) -> float:
    return -float(completion_tokens) if finish_reason == "stop" else -10.0
