# pyright: basic, reportMissingImports=false
"""Fixtures of the stages, which share the trainer's small model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from staleflow.clients.stage.critic import Critic
from staleflow.clients.stage.history import RunHistory
from tests.clients.stage.judged import gae_config
from tests.clients.trainer.conftest import model_directory

__all__ = ["critic", "model_directory"]


@pytest.fixture
def critic(model_directory: Path, tmp_path: Path) -> Iterator[Callable[..., Critic]]:
    """Build critics. With a seed the head returns non-zero values; a fresh critic returns 0."""
    made: list[Critic] = []
    whole = RunHistory()

    def make(
        folder: Path = tmp_path, seed: int | None = 0, micro_tokens: int = 64, history: RunHistory = whole
    ) -> Critic:
        made.append(Critic(gae_config(micro_tokens), model_directory, folder))
        made[-1].follow(history)
        if seed is not None:
            torch.manual_seed(seed)
            torch.nn.init.normal_(made[-1]._model.head.weight)
            torch.nn.init.normal_(made[-1]._model.head.bias)
        return made[-1]

    yield make
    for one in made:
        one._files.close()
