"""Properties of this host."""

import os
from pathlib import Path

from staleflow.process.host import usable_cores


def test_a_container_uses_no_more_cores_than_its_quota(tmp_path: Path) -> None:
    quota, all_cores = tmp_path / "cpu.max", len(os.sched_getaffinity(0))
    assert usable_cores(quota) == all_cores
    for text, cores in (("max 100000\n", all_cores), ("100000 100000\n", 1), ("50000 100000\n", 1)):
        quota.write_text(text)
        assert usable_cores(quota) == cores
