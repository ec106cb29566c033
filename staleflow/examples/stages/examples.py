"""The stages of ``configs/stages.toml``: small ones, that look at tokens only and need no model."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.user_code.group import Group


def length(group: Group, *, target: int) -> dict[str, Any]:
    """``closeness``, a value a sample: 0 for ``target`` tokens, -1 for none or twice as many."""
    return {"closeness": [-abs(len(ids) - target) / target for ids in group.token_ids]}


def repeats(group: Group) -> dict[str, Any]:
    """``seen``, a value a token: 1 where the completion had the same token before; ``share``, of its tokens."""
    observed = [_seen(ids) for ids in group.token_ids]
    return {"share": [float(one.mean()) if len(one) else 0.0 for one in observed], "seen": observed}


def _seen(ids: NDArray[np.int32]) -> NDArray[np.float32]:
    repeated = np.ones(len(ids), np.float32)
    repeated[np.unique(ids, return_index=True)[1]] = 0.0
    return repeated


def reward(prompt: str, completion: str, *, closeness: float, share: float, **columns: Any) -> float:
    """Out of what the two stages made of the sample; its text is not looked at."""
    return closeness - share


def credit(group: Group) -> dict[str, Any]:
    """``weights``, a value a token: of a sample that is better than its group's mean, repeated tokens get none."""
    rewards, observed = group.columns["reward/reward"], group.token_columns["repeats/seen"]
    better = rewards > rewards.mean()
    return {
        "weights": [
            1.0 - repeated if good else np.ones_like(repeated) for good, repeated in zip(better, observed, strict=True)
        ]
    }
