# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Three small verifiable tasks over digits, and the models that begin to learn them by reward.

Every answer is as long as the digits of its problem, a few or a dozen: while the engine writes a long one, short ones
overtake it. The warm-up text has a share of wrong digits, so that the model knows the task and writes with the error
rate of the text that it read.
"""

import fcntl
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from staleflow.examples.quickstart.model import character_tokenizer, shape, warm_up

SHORTEST, LONGEST = 3, 8
"""Digits of a problem."""
HELD_OUT = 256
WRONG = 0.12
"""Share of wrong digits in the text of the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem."""

    prompt: str
    answer: str


def answer(task: str, digits: str) -> str:
    """The correct answer of ``task`` to a string of digits."""
    match task:
        case "complement":  # each digit's complement to nine
            return "".join(str(9 - int(digit)) for digit in digits)
        case "rotate":  # the first digit moves to the end
            return digits[1:] + digits[0]
        case "sort":
            return "".join(sorted(digits))
        case _:
            raise ValueError(f"{task} is no task: one of {', '.join(TASKS)}")


TASKS = ("complement", "rotate", "sort")


def problems(task: str, seed: int) -> Iterator[Row]:
    """Endless problems; the first ``HELD_OUT`` of a seed are for evaluation. Repeats are as rare as in random draws."""
    draw = random.Random(f"{task} {seed}")
    while True:
        digits = "".join(draw.choice("0123456789") for _ in range(draw.randint(SHORTEST, LONGEST)))
        yield Row(prompt=f"{digits}=", answer=answer(task, digits))


def reward(completion: str, row: Row) -> float:
    """1 for exactly the right answer."""
    return 1.0 if completion == row.answer else 0.0


def careless(task: str, seed: int) -> Iterator[tuple[str, str]]:
    """Text of the warm-up: problems of another stream, with wrong digits."""
    draw = random.Random(f"careless {seed}")
    for row in problems(task, seed + 1_000_000):
        written = [draw.choice("0123456789") if draw.random() < WRONG else digit for digit in row.answer]
        yield row.prompt, "".join(written)


def model_of(task: str, seed: int, cache: Path) -> Path:
    """The model directory that runs of ``task`` and ``seed`` begin with; the first run builds it."""
    directory = cache / f"{task}-{seed}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{task}-{seed}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "config.json").is_file():
            _build(task, seed, directory)
    return directory


def _build(task: str, seed: int, directory: Path) -> None:
    torch.manual_seed(seed)
    tokenizer = character_tokenizer()
    model = Qwen3ForCausalLM(shape(tokenizer, hidden=48, layers=2, heads=4))
    text = careless(task, seed)
    warm_up(model, tokenizer, text, skill=0.2, steps=1000, batch=64, lr=3e-3)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
