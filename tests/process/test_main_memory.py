"""Free main memory is that of the container, whose cache can be released."""

from pathlib import Path

import pytest

from staleflow.process.main_memory import available


@pytest.mark.parametrize(("limit", "expected"), [("1000", 1000 - 700 + 200), ("600", 100), ("300", 0)])
def test_the_limit_of_a_container_counts_without_its_cache(tmp_path: Path, limit: str, expected: int) -> None:
    for name, text in {
        "memory.max": limit,
        "memory.current": "700",
        "memory.stat": "file 500\ninactive_file 200",
    }.items():
        (tmp_path / name).write_text(text + "\n")
    assert available(tmp_path) == expected


def test_without_a_limit_it_is_that_of_the_machine(tmp_path: Path) -> None:
    assert available(tmp_path) > 1 << 20
    for name in ("memory.max", "memory.current", "memory.stat"):
        (tmp_path / name).write_text(
            "max\n" if name == "memory.max" else "0\n" if name == "memory.current" else "inactive_file 0\n"
        )
    assert available(tmp_path) > 1 << 20
