# pyright: basic, reportMissingImports=false
"""An environment as authors of ``verifiers`` write it: a dataset, a tool and a rubric. It knows nothing of staleflow.

As a package of its own it would be ``verifiers.load_environment("calculator")``; from here it is loaded by import path.
"""

from typing import Any

import verifiers as vf
from datasets import Dataset

from staleflow.examples.environments.calculator import calculate
from staleflow.examples.quickstart import task


def load_environment(limit: int = 50, max_turns: int = 3) -> vf.Environment:
    """Sums of numbers below ``limit``. The policy may call the tool, and answers within ``max_turns`` turns."""
    return vf.ToolEnv(
        dataset=_dataset(task.prompts(0, limit=limit)),
        eval_dataset=_dataset(task.held_out(0, limit=limit)),
        tools=[calculator],
        rubric=vf.Rubric(funcs=[correct]),
        max_turns=max_turns,
    )


def calculator(expression: str) -> str:
    """Add or subtract two numbers.

    Args:
        expression: for example 47+38
    """
    return calculate(expression)


async def correct(completion: vf.Messages, answer: str) -> float:
    """1 if the last message is exactly the answer, else 0."""
    last: Any = completion[-1]
    return float(last.role == "assistant" and (last.content or "").strip() == answer)


def _dataset(rows: list[dict[str, str]]) -> Dataset:
    return Dataset.from_list([{"question": row["prompt"], "answer": row["answer"]} for row in rows])
