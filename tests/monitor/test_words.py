"""Formatting helpers shared by several pages give the expected words."""

from pathlib import Path

import staleflow
from staleflow.monitor.words import worker_name

SOURCES = Path(staleflow.__file__).parent


def test_a_worker_goes_by_its_name_without_the_nonce_of_its_process() -> None:
    assert [worker_name(id) for id in ("rollout-0.12ab", "gpu.local.12ab", "rollout-0", "")] == [
        *("rollout-0", "gpu.local", "rollout-0", "")
    ]


def test_one_place_knows_where_the_nonce_begins() -> None:
    files = [path for room in ("monitor", "report") for path in (SOURCES / room).glob("*.py")]
    assert [path.name for path in files if 'rpartition(".")' in path.read_text()] == ["words.py"]
