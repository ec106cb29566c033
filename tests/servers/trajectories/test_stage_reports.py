"""A shard reports the stages of its groups for as long as it serves, whatever replies it gets."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from staleflow.configs.schema import Config, Prompts, Reward
from staleflow.configs.stages import graph
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.servers.trajectories import stage_reports
from staleflow.servers.trajectories.filters import none
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.store import TABLES, TrajectoryStore
from staleflow.store import lmdb as lmdb_store

MAP_BYTES = 8 << 20


class Scheduler:
    """Refuses all reports but every fourth."""

    def __init__(self) -> None:
        self.asked = 0
        self.heard = asyncio.Event()

    async def ask(self, *_: object, **__: object) -> None:
        self.asked += 1
        if self.asked == 8:
            self.heard.set()
        if self.asked % 4:
            raise Refused(Code.DENIED, "it has another key")


async def test_a_refusal_ends_no_reports_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stage_reports, "INTERVAL_S", 0.001)
    store = lmdb_store.Store(tmp_path, tables=TABLES, map_bytes=MAP_BYTES, durability="process")
    scheduler: Any = Scheduler()
    stages = graph(Config(prompts=Prompts(), reward=Reward(run="")))
    shard = Shard(TrajectoryStore(store, map_bytes=MAP_BYTES), scheduler, shard=0, stages=stages, keep=none)
    reporting = asyncio.create_task(stage_reports.report_stages(scheduler, shard))
    async with asyncio.timeout(60):
        await scheduler.heard.wait()
    reporting.cancel()
    store.close()
    assert caplog.messages == ["scheduler rejected the stage report: denied: it has another key"] * 2
