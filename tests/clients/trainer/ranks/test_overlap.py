"""Ranks that upload their parts of a version while the next step trains publish what ranks that wait would."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.trainer.forked_ranks import start_rank
from tests.clients.trainer.ranks.overlap_process import STEPS
from tests.servers.parameters.test_service import versions
from tests.servers.running import Run, produced

pytestmark = pytest.mark.slow

LIMIT_S = 400.0


@pytest.fixture
async def runs(short_dir: Path) -> AsyncIterator[list[Run]]:
    """Two runs that keep every version."""
    sections: dict[str, Any] = {"parameters": {"keep_versions": STEPS + 1}, "trainer": {"steps": STEPS}}
    runs = [Run(short_dir / name, **sections) for name in ("a", "b")]
    for start in (start for run in runs for start in (run.scheduler, run.trajectories, run.parameters)):
        start()
    yield runs
    for run in runs:
        await run.close()


async def test_versions_of_fsdp_have_the_same_bytes_with_and_without_overlap(
    runs: list[Run], model_directory: Path, tmp_path: Path
) -> None:
    words = [str(model_directory), str(tmp_path), *(run.where.scheduler for run in runs)]
    output = [tmp_path / f"rank-{rank}.txt" for rank in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        module = "tests.clients.trainer.ranks.overlap_process"
        ranks = [start_rank(rank, 2, meeting, module, words, output[rank]) for rank in range(2)]
    try:
        async with produced(runs[0]), produced(runs[1]):
            ends = [asyncio.to_thread(rank.wait, LIMIT_S) for rank in ranks]
            codes = await asyncio.gather(*ends)
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], "\n".join(path.read_text() for path in output)
    waiting, overlapping = [
        {number: version["sha"] for number, version in (await versions(run)).items()} for run in runs
    ]
    assert overlapping == waiting
    assert len(set(waiting.values())) == STEPS + 1
