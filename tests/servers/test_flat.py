"""Two hundred thousand trajectories through one server leave its memory, open files and store size unchanged.

The long run with a million is ``python -m bench.flat --trajectories 1000000``.
"""

from pathlib import Path

import pytest

from bench.flat import SERVERS, Seen, measure

TRAJECTORIES = 200_000
SAMPLES = 30


def test_memory_files_and_store_are_flat_after_the_warm_up(short_dir: Path) -> None:
    flat = measure(short_dir / "run", TRAJECTORIES)
    assert flat.trajectories >= TRAJECTORIES
    assert {name: len(seen.memory) >= SAMPLES for name, seen in flat.servers.items()} == dict.fromkeys(SERVERS, True)
    assert flat.grown() == {}


@pytest.mark.parametrize("resource", ["memory", "files", "store"])
def test_what_grows_is_said(resource: str) -> None:
    flat = Seen(memory=[10**8] * 40, files=[30] * 40, store=[10**7] * 40)
    assert flat.grown() == []
    setattr(flat, resource, [value * (number + 1) for number, value in enumerate(getattr(flat, resource))])
    (said,) = flat.grown()
    assert said.startswith(f"{resource} grew from")
