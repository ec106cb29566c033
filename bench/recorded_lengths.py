"""The quickstart's reward, which also records the length of each completion, for ``bench.simulated_against_real``."""

import functools
import os
from typing import TextIO

from staleflow.examples.quickstart import task

VARIABLE = "STALEFLOW_BENCH_LENGTHS"
"""Environment variable with the path of the file."""


def reward(prompt: str, completion: str, answer: str, completion_tokens: int, **_: object) -> float:
    """Append the number of tokens to the file, as a line that ``rollout.simulated.lengths = "trace"`` reads."""
    _file().write(f'{{"tokens": {completion_tokens}}}\n')
    return task.reward(prompt, completion, answer)


@functools.cache
def _file() -> TextIO:
    return open(os.environ[VARIABLE], "a", buffering=1)
