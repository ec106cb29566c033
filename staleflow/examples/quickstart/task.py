"""Arithmetic with a checkable answer: the rows to learn from, the rows to judge by, and the reward.

A problem is ``a+b=`` or ``a-b=`` with operands below ``limit``; its answer is the number in decimal, ``-`` in front of
a negative one. Whether a problem is held out is a property of the problem itself, a checksum of its text, so that
training rows, held-out rows and the builder's pretraining text never mix, whatever their seeds.

Rules of this file: standard library only, and the same arguments always give the same rows in the same order.
"""

import random
from collections.abc import Iterator
from zlib import crc32

HELD_OUT_ONE_IN = 16
"""One in this number of problems is held out."""


def prompts(seed: int, *, limit: int = 100, operations: str = "+") -> list[dict[str, str]]:
    """Every training problem once, shuffled by ``seed``: rows ``{"prompt": "47+38=", "answer": "85"}``."""
    return _rows(seed, limit, operations, held_out=False)


def held_out(seed: int, *, limit: int = 100, operations: str = "+") -> list[dict[str, str]]:
    """Every held-out problem once, shuffled by ``seed``; none of them is in ``prompts`` under any seed."""
    return _rows(seed, limit, operations, held_out=True)


def reward(prompt: str, completion: str, answer: str, **_: object) -> float:
    """1 if the completion is exactly ``answer``, blanks around it aside; else 0, near misses and more text included."""
    return 1.0 if completion.strip() == answer else 0.0


def is_held_out(prompt: str) -> bool:
    """True for the problems that nothing may train on."""
    return crc32(prompt.encode()) % HELD_OUT_ONE_IN == 0


def _rows(seed: int, limit: int, operations: str, *, held_out: bool) -> list[dict[str, str]]:
    rows = [row for row in _problems(limit, operations) if is_held_out(row["prompt"]) == held_out]
    random.Random(seed).shuffle(rows)
    return rows


def _problems(limit: int, operations: str) -> Iterator[dict[str, str]]:
    if limit < 2 or not operations or set(operations) - {"+", "-"}:
        raise ValueError(f"limit={limit} operations={operations!r}; limit is at least 2, operations of '+' and '-'")
    for operation in dict.fromkeys(operations):
        for a in range(limit):
            for b in range(limit):
                yield {"prompt": f"{a}{operation}{b}=", "answer": str(a + b if operation == "+" else a - b)}
