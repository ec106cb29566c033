"""The run gives up the groups that a shard has lost, and continues."""

import asyncio
import shutil
from typing import Any, cast

import pytest

from staleflow.configs.schema import Config, Prompts, Reward
from staleflow.configs.stages import graph
from staleflow.net.client import Client
from staleflow.net.errors import Refused, Unavailable
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.messages import (
    Expected,
    GetExpected,
    GetGroups,
    Groups,
    Join,
    JoinReply,
    Operations,
    RegisterMissing,
    RegisterPush,
    Result,
    Results,
)
from staleflow.protocols.wire.stages import REWARD_COLUMN
from staleflow.servers.trajectories import service, stock
from staleflow.servers.trajectories.filters import FILTERS
from staleflow.servers.trajectories.registrar import Registrar
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.stock import take_stock
from staleflow.servers.trajectories.store import TABLES, TrajectoryStore
from staleflow.store.memory import MemoryStore
from tests.servers.running import WEIGHTS, Run, StageWorker, eventually, produced
from tests.servers.trajectories.test_many_recovered import MAP_BYTES, pushed


async def test_a_run_goes_on_when_the_disk_of_a_shard_is_lost(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    assigns = await rollout.leases(3)
    await rollout.push(*assigns[:3])
    items, _ = await (stage := StageWorker(run)).take()
    await stage.finish(items[:2])  # the third group stays pushed
    batch = await trainer.next_batch(0)
    await run.stop("trajectories-0")
    shutil.rmtree(run.run_dir / "trajectories-0")
    run.trajectories()

    async def given_up() -> bool:
        totals: dict[str, Any] = (await run.status(run.where.scheduler))["totals"]
        return bool(totals["drops"].get("quarantine") == 2 and totals["releases"].get("aborted") == 1)

    assert await eventually(given_up)
    async with produced(run):
        anew = await trainer.next_batch(0)
    assert anew.batch != batch.batch
    ask = GetGroups(groups=[m.group for m in anew.members], shas=[m.sha for m in anew.members])
    await run.shard(trainer.worker).call(ask)


async def test_all_that_a_rollback_brings_back_is_given_up_when_the_first_of_it_is_missed(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    async with produced(run):
        for step in range(3):
            batch = await trainer.next_batch(step)
            await trainer.publish(step + 1, WEIGHTS, batch.batch)
    await run.stop("trajectories-0")
    shutil.rmtree(run.run_dir / "trajectories-0")
    run.trajectories()
    await eventually(lambda: _has_none(run))  # groups that were not consumed yet
    join = Join(trainer=trainer.worker, lineage=Lineage(0), version=Version(0))
    trainer.joined = await trainer.scheduler.ask(join, JoinReply)
    batch = await trainer.next_batch(0)
    assert len(batch.members) > 1
    ask = GetGroups(groups=[batch.members[0].group], shas=[batch.members[0].sha])
    with pytest.raises(Refused, match="is not here"):
        await run.shard(trainer.worker).call(ask)
    await eventually(lambda: _has_none(run))


async def _has_none(run: Run) -> bool:
    """Return True if every pushed group is consumed or released."""
    ledger: dict[str, int] = (await run.status(run.where.scheduler))["ledger"]
    return not ledger["pushed"] + ledger["occupied"] + ledger["sealed"]


async def test_what_a_worker_pushes_again_onto_an_empty_disk_goes_through_its_stages_before_it_is_trained(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def comes_too_late(*_: object) -> None:
        pass

    monkeypatch.setattr(service, "take_stock", comes_too_late)
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    assigns = (await rollout.leases(2))[:2]
    await rollout.push(*assigns)
    items, _ = await (stage := StageWorker(run)).take()
    await stage.finish(items)
    batch = await trainer.next_batch(0)
    await run.stop("trajectories-0")
    shutil.rmtree(run.run_dir / "trajectories-0")
    run.trajectories()
    await rollout.until_room()
    assert {result.code for result in await rollout.push(*assigns)} == {None}
    ask = GetGroups(groups=[m.group for m in batch.members], shas=[m.sha for m in batch.members])
    with pytest.raises(Unavailable, match=r"busy: group .* is going through its stages again"):
        await run.shard(trainer.worker).call(ask, timeout_s=4)
    items, _ = await stage.take()
    await stage.finish(items)
    groups, _ = await run.shard(trainer.worker).call(ask)
    assert isinstance(groups, Groups)
    assert all(REWARD_COLUMN in [spec.name for spec in group.frames] for group in groups.groups)


class Witness:
    """A scheduler that counts on the bytes of ``pushed(1)``, regardless of other pushes under that lease.

    It refuses the first request for the expected groups and replies to the second.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.missed: list[RegisterMissing] = []

    async def ask(self, body: Operations | GetExpected, *_: object, **__: object) -> Results | Expected:
        good = pushed(1)
        if isinstance(body, GetExpected):
            self.asked += 1
            if self.asked == 1:
                raise Refused(Code.DENIED, "not at present")
            rest = body.after < good.key.group
            return Expected(groups=[good.key.group] * rest, shas=[good.record.sha] * rest)
        self.missed += [op for op in body.ops if isinstance(op, RegisterMissing)]
        other = [isinstance(op, RegisterPush) and op.sha != good.record.sha for op in body.ops]
        return Results(results=[Result(code=Code.CONFLICT) if no else Result() for no in other])


async def test_bytes_that_took_the_place_of_a_damaged_record_are_not_what_the_run_counts_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stock, "RETRY_INTERVAL_S", 0.01)
    rows = MemoryStore(TABLES)
    TrajectoryStore(rows, map_bytes=MAP_BYTES).write_pushes([pushed(1)])
    with rows.write() as txn:
        (key,) = txn.keys("records")
        txn.put("records", key, b"damaged")
    scheduler = cast("Client", witness := Witness())
    registrar = Registrar(scheduler)
    nodes = graph(Config(prompts=Prompts(), reward=Reward(run="")))
    store = TrajectoryStore(rows, map_bytes=MAP_BYTES)
    shard = Shard(store, registrar, shard=0, stages=nodes, keep=FILTERS["none"])
    running = asyncio.create_task(registrar.run())
    told: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    shard.push(pushed(2)._replace(key=pushed(1).key), told.set_result)
    shard.commit()
    assert (await told).code is Code.CONFLICT
    await shard.recover()
    await take_stock(scheduler, shard)
    running.cancel()
    assert witness.missed == [RegisterMissing(group=pushed(1).key.group, shard=0, sha=pushed(1).record.sha)]
