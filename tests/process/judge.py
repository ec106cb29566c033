"""A judge and a reward for whole runs; child processes load this file by path."""

import time
from pathlib import Path
from typing import Any

from staleflow.clients.user_code.group import Group


def prompts(seed: int) -> list[dict[str, Any]]:
    """Held-out prompts, numbered."""
    return [{"prompt": f"{number}+{number + 1}=", "answer": "", "number": number} for number in range(12)]


def judge(group: Group, *, hold: str) -> dict[str, Any]:
    """Score a completion by its tokens. The first held-out prompt waits while the file ``hold`` exists."""
    while group.row.get("number") == 0 and Path(hold).exists():
        time.sleep(0.02)
    return {"score": [float(sum(place * token for place, token in enumerate(ids, 1))) for ids in group.token_ids]}


def reward(prompt: str, completion: str, *, score: float, **columns: Any) -> float:
    return score
