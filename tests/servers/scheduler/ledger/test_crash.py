"""After ``kill -9`` at any instant, everything acknowledged is recovered, and all peers continue without help."""

import asyncio
import json
import random
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from staleflow.configs.algorithm import Algorithm
from staleflow.configs.loading.load import write_resolved
from staleflow.configs.schema import Config, Model
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Version
from staleflow.protocols.wire.messages import Batch, Done, Metrics
from staleflow.protocols.wire.stages import CRITIC
from staleflow.store.memory import MemoryWrite
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import TIMEOUT_S, Cast, Instance, Someone, TrainerOf, World, config


async def test_leases_batches_and_fences_survive(world: World) -> None:
    cast = await Cast(world).enter()
    assigns = await cast.finish(2)
    batch = await cast.trainer.next_batch(0)
    world.kill()
    world.start()
    values = await world.status()
    assert (values["incarnation"], values["version"], values["trainer_term"]) == (2, 0, 1)
    assert (values["ledger"]["leased"], values["ledger"]["sealed"]) == (2, 2)
    again = await cast.trainer.next_batch(0)
    assert again.members == batch.members
    assert (again.batch, again.digest, again.step) == (batch.batch, batch.digest, batch.step)
    duplicate = await cast.shard.operate(cast.shard.push(assigns[0], cast.instance.worker))
    assert [result.code for result in duplicate] == [None]
    await cast.finish(2)
    await cast.trainer.publish(1, batch.batch)
    assert (await cast.trainer.publish(1, batch.batch)).version == 1
    world.stop()
    report = world.audit()
    assert report.events["open"] == 2
    assert report.steps == 1


async def test_nobody_needs_to_attach_again(world: World) -> None:
    cast = await Cast(world).enter()
    held = await cast.instance.until_held(4)
    world.kill()
    world.start()
    cast.instance.held.clear()  # the instance lost them too
    assert await cast.instance.until_held(4) == held
    await cast.finish(2)
    await cast.trainer.next_batch(0)
    await cast.parameters.attach()
    assert (await cast.shard.attach()).shards == ["ipc:///none"]


async def test_who_never_comes_back_loses_his_leases_when_they_expire(short_dir: Path) -> None:
    world = World(short_dir / "run", config(lease_s=2.0))
    world.start()
    try:
        cast = await Cast(world).enter()
        lost = await cast.instance.until_held(4)
        cast.instance.client.close()
        world.kill()
        world.start()
        other = Instance(world, "rollout-1")
        await other.attach()
        async with asyncio.timeout(TIMEOUT_S):
            while {assign.group for assign in other.held.values()} != {assign.group for assign in lost}:
                await other.report()
        late = await cast.shard.operate(cast.shard.push(next(iter(cast.instance.held.values())), cast.instance.worker))
        assert [result.code for result in late] == [Code.STALE_LEASE]
        world.stop()
        world.audit()
        lines = [json.loads(line) for line in (world.run_dir / "trace.jsonl").read_bytes().splitlines()]
        expired = [line["lease"] for line in lines if line["ev"] == "release" and line["why"] == "expired"]
        leases = {assign.lease for assign in lost}  # leases of the other instance may expire during the stop
        assert sorted(lease for lease in expired if lease in leases) == sorted(leases)
    finally:
        world.close()


async def _train(cast: Cast, steps: int) -> list[dict[str, object]]:
    """Train until ``steps`` despite restarts of the scheduler; return the acknowledged batches in order."""
    acknowledged = list[dict[str, object]]()
    for step in range(steps):
        assigns = (await cast.instance.until_held(2))[:2]
        await cast.shard.finish(assigns, cast.instance.worker)
        cast.instance.let_go(assigns)
        for assign in assigns:
            acknowledged.append({"ev": "occupy", "group": assign.group})
        batch = await cast.trainer.next_batch(step, timeout_s=TIMEOUT_S)
        await cast.trainer.publish(step + 1, batch.batch)
        acknowledged.append({"ev": "consume", "batch": batch.batch, "step": step})
        if step % 3 == 2:
            await cast.trainer.checkpoint(step + 1)
        metrics = Metrics(worker=cast.trainer.worker, step=batch.step, values={})
        await cast.trainer.client.ask(metrics, Done, timeout_s=TIMEOUT_S)
    return acknowledged


async def test_a_run_that_is_killed_again_and_again_loses_nothing_acknowledged(world: World) -> None:
    cast = await Cast(world).enter()
    chosen = random.Random(5)
    training = asyncio.ensure_future(_train(cast, 60))
    kills = 0
    while not training.done() and kills < 6:
        await asyncio.sleep(chosen.uniform(0.0, 0.04))
        if not training.done():
            world.kill()
            world.start()
            kills += 1
    acknowledged = await training
    assert kills == 6
    world.stop()
    report = world.audit()
    assert report.steps == 60
    assert report.events["open"] == kills + 1
    told = [json.loads(line) for line in (world.run_dir / "trace.jsonl").read_bytes().splitlines()]
    for fact in acknowledged:
        assert any(fact.items() <= line.items() for line in told), fact
    steps = [json.loads(line)["step"] for line in (world.run_dir / "metrics.jsonl").read_bytes().splitlines()]
    assert steps == list(range(60))


async def test_a_trainer_that_comes_back_from_a_checkpoint_replays_the_same_batches(world: World) -> None:
    cast = await Cast(world).enter()
    batches = list[Batch]()
    for step in range(3):
        await cast.finish(2)
        batches.append(await cast.trainer.next_batch(step))
        await cast.trainer.publish(step + 1, batches[-1].batch)
        if step == 0:
            await cast.trainer.checkpoint(1)
    world.kill()
    world.start()
    newer = TrainerOf(world)
    await newer.attach()
    with pytest.raises(Refused) as refused:
        await newer.join(version=0)
    assert refused.value.code is Code.BAD_VERSION
    joined = await newer.join(version=1)
    assert (joined.lineage, joined.version) == (1, 1)
    again = await newer.next_batch(1)
    assert again.members == batches[1].members
    assert again.digest == batches[1].digest
    assert again.batch != batches[1].batch
    await newer.publish(2, again.batch, lineage=1)
    await cast.instance.report()
    for _ in range(3):
        await cast.instance.report()
    assert cast.instance.stats.version == Version(2)
    assert cast.instance.stats.lineage == 1
    world.stop()
    assert world.audit().events["rollback"] == 1


async def test_sigterm_ends_in_order_and_the_next_start_goes_on(world: World) -> None:
    cast = await Cast(world).enter()
    await cast.instance.until_held(4)
    assert world.stop() == 0
    assert world.audit().closed
    world.start()
    assert (await world.status())["ledger"]["leased"] == 4
    world.stop()
    report = world.audit()
    assert report.events["open"] == report.events["close"] == 2


@pytest.mark.parametrize(
    "other",
    [config(batch_size=3), config(max_staleness=2), config(lease_s=31.0)],
    ids=["batch_size", "max_staleness", "lease_s"],
)
async def test_a_run_directory_of_another_configuration_is_refused_and_left_alone(world: World, other: Config) -> None:
    await Cast(world).enter()
    world.kill()
    before = (world.run_dir / "trace.jsonl").read_bytes()
    stranger = World(world.run_dir, other)
    stranger.spawn()
    code, said = stranger.ended()
    assert code == 2
    assert "was started with" in said
    assert (world.run_dir / "trace.jsonl").read_bytes() == before
    write_resolved(world.config, world.run_dir)
    world.start()
    assert (await world.status())["incarnation"] == 2


async def test_two_schedulers_do_not_share_a_run_directory(world: World) -> None:
    second = World(world.run_dir, world.config)
    second.spawn()
    code, said = second.ended()
    assert code == 2
    assert "in use by process" in said
    assert (await world.status())["incarnation"] == 1


async def test_a_trace_that_lost_lines_is_refused(world: World) -> None:
    await Cast(world).enter()
    world.kill()
    (world.run_dir / "trace.jsonl").unlink()
    world.spawn()
    code, said = world.ended()
    assert code == 2
    assert "trace.jsonl" in said


async def test_a_full_map_refuses_pushes_and_goes_on_reading_and_consuming(short_dir: Path) -> None:
    world = World(short_dir / "run", config(batch_size=128, map_mb=4))
    world.start()
    try:
        cast = await Cast(world, capacity=256).enter()
        await cast.finish(128)
        batch = await cast.trainer.next_batch(0)
        assigns = iter(await cast.instance.until_held(128))
        code = None
        while code is None and (await world.status())["map_used"] < 0.92:
            fat = cast.shard.fat_push(next(assigns), cast.instance.worker, 40_000)
            code = (await cast.shard.operate(fat))[0].code
        assert code in (None, Code.BUSY)
        await world.until("full", "map")
        (refused,) = await cast.shard.operate(cast.shard.push(next(assigns), cast.instance.worker))
        assert refused.code is Code.BUSY
        assert "map is full" in (await world.status())["why"]
        assert (await cast.trainer.next_batch(0)).digest == batch.digest
        assert (await cast.trainer.publish(1, batch.batch)).version == 1
        world.stop()
        report = world.audit()
        assert report.events["overload"] == 1
        assert report.events["reject:busy"]
    finally:
        world.close()


async def test_a_commit_that_fails_answers_busy_and_never_happened(short_dir: Path) -> None:
    world = World(short_dir / "run", config(map_mb=1))
    world.start()
    try:
        cast = await Cast(world).enter()
        assigns = await cast.instance.until_held(4)
        push = cast.shard.push(assigns[0], cast.instance.worker)
        huge = cast.shard.fat_push(assigns[0], cast.instance.worker, 900_000)
        assert [result.code for result in await cast.shard.operate(huge)] == [Code.BUSY]
        assert (await world.status())["ledger"]["pushed"] == 0
        await world.until("full", "")
        assert [result.code for result in await cast.shard.operate(push)] == [None]
        await cast.instance.report()
        world.stop()
        assert world.audit().events["push"] == 1
    finally:
        world.close()


async def test_who_only_sends_heartbeats_is_known_to_be_there_after_a_restart(short_dir: Path) -> None:
    """A stage worker sends no request after its attach; a second critic must still be detected."""
    settings = config()
    judged = msgspec.structs.replace(settings.trainer, algorithm=Algorithm(advantage="gae"))
    model = Model(path=str(short_dir))
    world = World(short_dir / "run", msgspec.structs.replace(settings, trainer=judged, model=model))
    world.start()
    try:
        await Someone(world, "critic-0", "stage", stage=CRITIC).attach()
        world.kill()
        world.start()
        async with asyncio.timeout(TIMEOUT_S):
            while not [row for row in (await world.status())["workers"] if row["alive"] and row["role"] == "stage"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        with pytest.raises(Refused, match="critic-0 is this run's critic"):
            await Someone(world, "critic-1", "stage", stage=CRITIC).attach()
    finally:
        world.close()


def test_a_commit_that_raises_an_unexpected_error_leaves_no_line_in_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that the store never had would make the ledger look like an older copy, and the run unresumable."""
    table = Table(tmp_path / "run", config(batch_size=2))
    Seat(table, "a")
    lines, real = table.interpreter.trace.path.read_bytes(), table.store.write

    @contextmanager
    def failing() -> Generator[MemoryWrite]:
        with real() as txn:
            yield txn
            raise RuntimeError("the transaction failed in a way that no store names")

    monkeypatch.setattr(table.store, "write", failing)
    with pytest.raises(RuntimeError, match="no store names"):
        table.service.close("SIGTERM")
    monkeypatch.undo()
    table.restart()
    assert table.interpreter.trace.path.read_bytes().startswith(lines)
    report = table.close()
    assert (report.events["open"], report.events["close"]) == (2, 1)
