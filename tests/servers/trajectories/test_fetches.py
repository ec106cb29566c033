"""Payload is not copied within a host and is sent once to each reading process of another; ranks share the groups."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from staleflow.clients.stage import worker as stage_worker
from staleflow.clients.stage.worker import StageGroup, StageOutcome
from staleflow.clients.stage.worker import StageWorker as ShippedStageWorker
from staleflow.clients.trainer.data.fetch import Fetcher
from staleflow.clients.trainer.data.prefetch import BatchStream
from staleflow.net.client import Client, worker_id
from staleflow.protocols.consistency.ids import Step
from staleflow.protocols.wire.messages import Reply, Request
from staleflow.protocols.wire.tensors import pack
from tests.servers.running import WEIGHTS, Run, StageWorker, payload

LATER = [{"name": "later", "run": "m:f", "needs": ["reward/reward"], "makes": ["score"]}]
GROUPS = 2


class Counted(Client):
    """Count the bytes that arrive in reply frames, by request type."""

    def __init__(self, counts: Counter[str], *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._counts = counts

    async def call(
        self, body: Request, frames: Sequence[Any] = (), *, timeout_s: float | None = 30.0
    ) -> tuple[Reply, list[memoryview]]:
        reply, found = await super().call(body, frames, timeout_s=timeout_s)
        self._counts[f"{type(body).__name__} {getattr(body, 'stage', '')}".strip()] += sum(map(len, found))
        return reply, found


class Makes:
    """A stage that makes one column of zeros and ones."""

    together: ClassVar[bool] = False

    def __init__(self, column: str) -> None:
        self._column = column

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        return [{self._column: np.asarray([0.0, 1.0], np.float32)}] * len(groups)

    async def accepted(self, groups: Sequence[StageGroup]) -> None: ...


@pytest.mark.parametrize("host", ["", "another"], ids=["the same host", "another host"])
async def test_payload_travels_once_to_each_reader_of_another_host_and_to_none_of_its_own(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    if host:
        monkeypatch.setattr(stage_worker, "boot_id", lambda: host)
    run = make_run(stage=LATER)
    run.scheduler()
    run.trajectories()
    run.parameters()
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    await rollout.push(*(await rollout.leases(GROUPS))[:GROUPS])
    counts, working = Counter[str](), list[asyncio.Task[None]]()
    for stage, column in (("reward", "reward"), ("later", "stage/later/score")):
        me = worker_id(f"{stage}-0")
        shard = Counted(counts, run.where.trajectories[0], worker=me)
        run.clients.append(shard)
        shipped = ShippedStageWorker(worker=me, name=stage, stage=Makes(column), max_groups=GROUPS)
        working.append(asyncio.create_task(shipped.serve([shard])))
    batch = await trainer.next_batch(0)
    for task in working:
        task.cancel()
    shard = Counted(counts, run.where.trajectories[0], worker=trainer.worker)
    run.clients.append(shard)
    fetched = await Fetcher([shard], mapped=not host).members(batch.members)
    assert len(fetched) == GROUPS
    made = GROUPS * 2 * 4  # two samples, float32
    packed = GROUPS * len(pack(payload(0, seed=batch.members[0].group).to_arrays()))
    assert counts["GetStageWork reward"] == (packed if host else 0)
    assert counts["GetStageWork later"] == (packed if host else 0) + made
    assert counts["GetGroups"] == (packed if host else 0) + 2 * made


async def test_ranks_share_what_they_have_to_work_through_prompts_and_environments_too(
    make_run: Callable[..., Run],
) -> None:
    trainer_section = {"backend": "simulated", "batch_size": 4, "steps": 10}
    run = make_run(trainer=trainer_section, environment={"run": "anywhere:Anything"})
    run.scheduler()
    run.trajectories()
    run.parameters()
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    stage = StageWorker(run)
    of_group = dict[int, int]()
    for leased, (prompt, read) in zip((await rollout.leases(4))[:4], ((1, 0), (90, 2), (2, 0), (91, 4)), strict=True):
        assert [r.code for r in await rollout.push(leased, prompt=prompt, read=read)] == [None]
        await stage.finish((await stage.take())[0])
        of_group[leased.group] = 2 * (prompt + 5)
    batch = await trainer.next_batch(0)
    assert {member.group: member.sequence_tokens for member in batch.members} == of_group
    parts = list[int]()
    for rank in range(2):
        term = trainer.joined.trainer_term
        stream = BatchStream(trainer.scheduler, [run.shard(trainer.worker)], term, rank=rank, world=2)
        _, groups = await stream.groups(Step(0))
        parts.append(sum(of_group[group.group] for group in groups))
    assert parts == [204, 204]
