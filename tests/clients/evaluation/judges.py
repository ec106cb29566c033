"""Stages and rewards for the tests of evaluations. Child processes load this file by path."""

from typing import Any

from staleflow.clients.user_code.group import Group


def judge(group: Group) -> dict[str, Any]:
    """Score a sample by its length, and each of its tokens by its id."""
    if group.row.get("then") == "unjudged":
        raise ValueError("no opinion")
    return {
        "score": [float(len(tokens)) for tokens in group.token_ids],
        "ids": [tokens.astype(float) for tokens in group.token_ids],
    }


def judged(prompt: str, completion: str, *, score: float, **columns: Any) -> float:
    return 10 * score


def two(prompt: str, completion: str, **columns: Any) -> float:
    return 2.0


def ids_sum(prompt: str, completion: str, *, completion_ids: list[int], **columns: Any) -> float:
    return float(sum(place * token for place, token in enumerate(completion_ids, 1)))
