"""Groups for the stages that hold a model."""

from typing import Any

import msgspec
import numpy as np

from staleflow.clients.stage.worker import Failed, StageGroup, StageOutcome
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.trajectory import GroupPayload
from tests.clients.trainer.making import payload

RAGGED = [(3, [4, 1, 7]), (6, [2, 0]), (1, [5, 5, 9, 3])]
"""Prompt length and completion lengths."""


def going_on() -> bool:
    return False


def asked_to_end() -> bool:
    return True


def group(
    number: int, prompt: int = 3, lengths: tuple[int, ...] = (4, 6), *, lineage: int = 0, version: int = 0
) -> StageGroup:
    """Build a random group; the same number gives the same group."""
    made = payload(number, list(lengths), version=version, prompt=prompt)
    made.segments[:, 1] = lineage
    return StageGroup(group=GroupId(number), row={}, payload=made)


def ragged() -> list[StageGroup]:
    return [group(100 + n, prompt, tuple(lengths)) for n, (prompt, lengths) in enumerate(RAGGED)]


def sequences(made: GroupPayload) -> list[list[int]]:
    """Return prompt and completion of each sample."""
    parts = np.split(made.token_ids, np.cumsum(made.lengths)[:-1])
    return [[*made.prompt_ids.tolist(), *part.tolist()] for part in parts]


def column(made: StageOutcome, name: str) -> np.ndarray:
    assert not isinstance(made, Failed), made.why
    assert made[name].dtype == np.float32
    return made[name]


def gae_config(micro_tokens: int = 64, critic: dict[str, Any] | None = None, **algorithm: Any) -> Config:
    table: dict[str, Any] = {
        "prompts": {"source": "somewhere:prompts"},
        "reward": {"run": "somewhere:reward"},
        "critic": {"lr": 3e-3, "batch": 2, **(critic or {})},
        "trainer": {
            "micro_tokens": micro_tokens,
            "checkpoint_every": 3,
            "algorithm": {"advantage": "gae", **algorithm},
        },
    }
    return msgspec.convert(table, Config)
