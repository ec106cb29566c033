"""A complete minimal configuration, written where a test needs it."""

from collections.abc import Callable
from pathlib import Path

import pytest

MINIMAL = """
name = "tiny"
[prompts]
source = "staleflow.examples.quickstart.task:prompts"
[reward]
run = "staleflow.examples.quickstart.task:reward"
[rollout]
engine = "simulated"
filter = "none"
[trainer]
backend = "simulated"
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a configuration file and return its path."""

    def to(text: str = MINIMAL, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return to
