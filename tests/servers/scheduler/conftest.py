"""A run directory with a scheduler process that ends with the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.scheduler.world import World, config


@pytest.fixture
def world(short_dir: Path) -> Iterator[World]:
    """A serving scheduler: batches of two groups, staleness 1."""
    made = World(short_dir / "run", config())
    made.start()
    yield made
    made.close()
