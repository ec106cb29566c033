"""A running scheduler gives each peer the answers and guarantees that the protocol promises."""

import asyncio
import json
from contextlib import closing
from pathlib import Path

import pytest

from staleflow.net.errors import Refused, Unavailable
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Step, TrainerTerm, Version
from staleflow.protocols.wire.messages import (
    Detach,
    Done,
    Drain,
    Finished,
    GetBatch,
    GetRetained,
    GetRetainedVersions,
    Metrics,
    Pull,
    Retained,
    RetainedVersions,
)
from tests.clients.rollout.peers import ONCE
from tests.servers.scheduler.world import TIMEOUT_S, Cast, Instance, Shard, Someone, TrainerOf, World, config


async def test_a_whole_step_from_lease_to_version(world: World) -> None:
    cast = await Cast(world).enter()
    waiting = asyncio.ensure_future(cast.trainer.next_batch(0))
    assigns = await cast.finish(2)
    batch = await waiting
    assert [member.group for member in batch.members] == [assign.group for assign in assigns]
    assert [member.version for member in batch.members] == [0, 0]
    assert (batch.step, batch.attempt, batch.mask_below) == (0, 1, -1)
    await cast.trainer.publish(1, batch.batch)
    commands = await cast.instance.report()
    assert Pull(lineage=batch.lineage, version=Version(1)) in commands.commands
    await cast.trainer.checkpoint(1)
    values = await world.status()
    assert (values["version"], values["next_step"], values["violations"]) == (1, 1, 0)
    assert world.stop() == 0
    report = world.audit()
    assert report.closed
    assert report.steps == 1


async def test_weights_come_before_work(world: World) -> None:
    cast = await Cast(world).enter()
    first = await cast.instance.report()
    assert [type(command) for command in first.commands] == [Pull]
    assigns = await cast.instance.until_held(4)
    assert {assign.version for assign in assigns} == {0}
    assert len({assign.group for assign in assigns}) == 4


async def test_the_bound_is_the_limit_of_what_is_handed_out(world: World) -> None:
    cast = await Cast(world, capacity=100).enter()
    await cast.instance.until_held(4)  # B * (eta + 1)
    await cast.instance.report()
    assert len(cast.instance.held) == 4


async def test_commands_are_repeated_until_they_are_acknowledged(world: World) -> None:
    cast = await Cast(world).enter()
    await cast.instance.report()
    first = await cast.instance.report()
    cast.instance.ack = first.first - 1  # as if the answer had been lost
    cast.instance.held.clear()
    second = await cast.instance.report()
    assert second.first == first.first
    assert second.commands[: len(first.commands)] == first.commands


async def test_a_lease_that_an_instance_lost_is_assigned_again_and_a_foreign_one_aborted(world: World) -> None:
    cast = await Cast(world).enter()
    assigns = await cast.instance.until_held(4)
    lost = cast.instance.held.pop(assigns[1].lease)
    await cast.instance.report()
    assert cast.instance.held[lost.lease] == lost
    cast.instance.held[LeaseId(999)] = lost
    await cast.instance.report()
    assert cast.instance.aborted == [999]


async def test_a_newer_process_of_the_same_name_gets_the_leases_of_the_older_at_once(world: World) -> None:
    cast = await Cast(world).enter()
    old = {assign.group for assign in await cast.instance.until_held(4)}
    newer = Instance(world)
    await newer.attach()
    again = await newer.until_held(4)
    assert {assign.group for assign in again} == old
    with pytest.raises(Refused) as refused:
        await cast.instance.report()
    assert refused.value.code is Code.FENCED
    late = await cast.shard.operate(cast.shard.push(next(iter(cast.instance.held.values())), cast.instance.worker))
    assert [result.code for result in late] == [Code.STALE_LEASE]
    world.stop()
    assert world.audit().events["release:aborted"] == 4


async def test_goodbye_frees_the_leases(world: World) -> None:
    cast = await Cast(world).enter()
    held = await cast.instance.until_held(4)
    await cast.instance.client.ask(Detach(worker=cast.instance.worker, why="done"), Done)
    values = await world.until("ledger.leased", 0)
    assert values["totals"]["releases"] == {"aborted": 4}
    other = Instance(world, "rollout-1")
    await other.attach()
    assert {assign.group for assign in await other.until_held(4)} == {assign.group for assign in held}


async def test_operations_sent_twice_have_one_effect_and_the_same_answer(world: World) -> None:
    cast = await Cast(world).enter()
    (assign, *_) = await cast.instance.until_held(1)
    push, occupy = cast.shard.push(assign, cast.instance.worker), cast.shard.occupy(assign)
    cast.shard.client = world.client(cast.shard.worker, ONCE)  # a resent request would add duplicates
    results = await cast.shard.operate(push, push, occupy, occupy, push)
    assert [result.code for result in results] == [None] * 5
    values = await world.status()
    assert (values["totals"]["pushes"], values["totals"]["occupies"]) == (1, 1)
    assert values["totals"]["rejects"] == {"duplicate": 3}


async def test_the_same_lease_with_other_bytes_is_a_conflict(world: World) -> None:
    cast = await Cast(world).enter()
    (assign, *_) = await cast.instance.until_held(1)
    push = cast.shard.push(assign, cast.instance.worker)
    changed = cast.shard.fat_push(assign, cast.instance.worker, 64)
    results = await cast.shard.operate(push, changed)
    assert [result.code for result in results] == [None, Code.CONFLICT]


async def test_an_operation_that_makes_no_sense_is_denied_and_changes_nothing(world: World) -> None:
    cast = await Cast(world).enter()
    (assign, *_) = await cast.instance.until_held(1)
    results = await cast.shard.operate(cast.shard.occupy(assign), cast.shard.push(assign, cast.instance.worker))
    assert [result.code for result in results] == [Code.DENIED, None]


async def test_a_filtered_group_retires_and_one_that_failed_comes_again_later(
    world: World,
) -> None:
    cast = await Cast(world, rows=6).enter()
    assigns = await cast.instance.until_held(4)
    filtered, failed = assigns[0], assigns[1]
    await cast.shard.operate(
        cast.shard.push(filtered, cast.instance.worker),
        cast.shard.release(filtered, ReleaseWhy.FILTERED),
        cast.shard.release(failed, ReleaseWhy.ABORTED),
    )
    cast.instance.let_go([filtered, failed])
    seen = [assign.group for assign in assigns]
    for step in range(5):
        seen += [assign.group for assign in await cast.finish(2)]
        batch = await cast.trainer.next_batch(step)
        await cast.trainer.publish(step + 1, batch.batch)
    assert seen.count(filtered.group) == 1
    assert (seen.count(failed.group), seen.count(GroupId(failed.group + 6))) == (2, 1)
    assert failed.group not in seen[4:6]


async def test_a_silent_instance_gets_nothing_and_is_welcome_when_it_is_back(world: World) -> None:
    cast = await Cast(world).enter()
    await cast.instance.until_held(2)
    cast.instance.client.close()
    await world.until("instances", [])
    assert (await world.until("why", "no rollout worker is attached"))["ledger"]["leased"] == 4
    cast.instance.client = world.client(cast.instance.worker)
    await cast.instance.until_held(4)
    world.stop()
    world.audit()
    lines = [json.loads(line) for line in (world.run_dir / "trace.jsonl").read_bytes().splitlines()]
    assert [line["worker"] for line in lines if line["ev"] == "detach"].count(cast.instance.worker) == 1


async def test_a_trainer_that_waits_in_vain_is_told_why(world: World) -> None:
    cast = await Cast(world).enter()
    with pytest.raises(Unavailable, match="step 0 waits for groups: 0 of 2 are ready"):
        await cast.trainer.next_batch(0, timeout_s=4)


async def test_a_newer_trainer_fences_the_older_even_while_it_waits(world: World) -> None:
    cast = await Cast(world).enter()
    waiting = asyncio.ensure_future(cast.trainer.next_batch(0))
    await asyncio.sleep(0)
    newer = TrainerOf(world)
    await newer.attach()
    assert (await newer.join()).trainer_term == 2
    with pytest.raises(Refused) as refused:
        await waiting
    assert refused.value.code is Code.FENCED
    with pytest.raises(Refused) as refused:
        await cast.trainer.publish(1)
    assert refused.value.code is Code.FENCED
    with pytest.raises(Refused) as refused:
        await cast.trainer.checkpoint(0)
    assert refused.value.code is Code.FENCED


async def test_a_batch_is_the_same_however_often_it_is_asked_for(world: World) -> None:
    cast = await Cast(world).enter()
    await cast.finish(2)
    first, second = await cast.trainer.next_batch(0), await cast.trainer.next_batch(0)
    assert first.attempt == 1 < second.attempt  # a resent request adds an attempt
    assert (first.batch, first.members, first.digest) == (second.batch, second.members, second.digest)


async def test_versions_and_payload_that_may_be_needed_are_kept(world: World) -> None:
    cast = await Cast(world).enter()
    assigns = await cast.finish(2)
    batch = await cast.trainer.next_batch(0)
    await cast.trainer.publish(1, batch.batch)
    groups = [assign.group for assign in assigns]
    asked = GetRetained(shard=0, groups=[*groups, GroupId(10**9)])
    assert (await cast.shard.client.ask(asked, Retained)).keep == groups
    in_use = await cast.parameters.client.ask(GetRetainedVersions(), RetainedVersions)
    assert [version for _, version in in_use.versions] == [0, 1]
    await cast.trainer.checkpoint(1)
    assert (await cast.shard.client.ask(asked, Retained)).keep == []


async def test_who_may_attach(world: World) -> None:
    async def refusal(someone: Someone) -> Code:
        with pytest.raises(Refused) as refused:
            await someone.attach()
        return refused.value.code

    await Shard(world, rows=10).attach()
    assert await refusal(Someone(world, "x", "king")) is Code.DENIED
    assert await refusal(Someone(world, "x", "rollout", config_sha="other")) is Code.CONFLICT
    assert await refusal(Shard(world, rows=11)) is Code.CONFLICT
    assert await refusal(Shard(world, rows=10, prompts_sha="q")) is Code.CONFLICT
    assert await refusal(Someone(world, "t", "trajectories", shard=1, rows=10, prompts_sha="p")) is Code.CONFLICT
    imposter = Someone(world, "a", "rollout")
    imposter.client = world.client(Someone(world, "b", "rollout").worker)
    assert await refusal(imposter) is Code.DENIED
    with pytest.raises(Refused, match="not attached"):
        await Instance(world, "stranger").report()


async def test_the_scheduler_says_whom_it_waits_for(world: World) -> None:
    await world.until("why", "trajectory server 0 has not attached")
    cast = Cast(world)
    await cast.shard.attach()
    await world.until("why", "the parameter server has not attached")
    await cast.parameters.attach()
    await world.until("why", "no trainer has joined")
    await cast.trainer.attach()
    await cast.trainer.join()
    await world.until_why("version 0 is still to be published")
    await cast.trainer.publish(0)
    await world.until("why", "no rollout worker is attached")
    await cast.instance.attach()
    assigns = await cast.instance.until_held(4)
    await cast.shard.operate(*(cast.shard.push(assign, cast.instance.worker) for assign in assigns[:2]))
    await world.until_why("2 are in stages; no reward worker is attached")


async def test_one_line_of_metrics_a_step(world: World) -> None:
    cast = await Cast(world, capacity=2).enter()
    cast.instance.pause_s = 0.25
    for step in range(2):
        async with asyncio.timeout(TIMEOUT_S):
            while cast.instance.stats.version < step:
                await cast.instance.report()
        await cast.instance.report()  # says that it has loaded the version
        await cast.finish(2)
        batch = await cast.trainer.next_batch(step)
        await cast.trainer.publish(step + 1, batch.batch)
        metrics = Metrics(worker=cast.trainer.worker, step=Step(step), values={"loss": 0.5})
        await cast.trainer.client.ask(metrics, Done)
        await cast.trainer.client.ask(metrics, Done)
    lines = [json.loads(line) for line in (world.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert {
        "loss",
        "off_policy/mean",
        "off_policy/max",
        "off_policy/in_flight/mean",
        "off_policy/in_queue/max",
        "staleness/violations",
        "staleness/masked_token_ratio",
        "staleness/dropped",
        "staleness/length_bias",
        "length/ranker_tau",
        "length/ranker_n",
        "perf/tokens_per_second",
        "perf/samples_per_second",
        "rollout/running",
        "rollout/waiting",
        "rollout/idle_ratio",
    } <= lines[1].keys()
    assert lines[1]["off_policy/max"] <= 1
    assert lines[1]["staleness/length_bias"] == 1.0
    assert [line.get("time/pause") for line in lines] == [None, 0.25], "the first load interrupts no decoding"
    assert min(line["time/reserve"] for line in lines) > 0


async def test_after_the_last_step_nothing_new_is_handed_out_and_the_trace_closes(world: World) -> None:
    cast = await Cast(world).enter()
    assigns = await cast.instance.until_held(4)
    await cast.trainer.client.ask(Finished(trainer_term=cast.trainer.term), Done)
    await cast.instance.report()
    assert cast.instance.drain
    await cast.shard.operate(*(cast.shard.release(assign, ReleaseWhy.ABORTED) for assign in assigns))
    values = await world.until("ledger.leased", 0)
    assert values["finished"]
    assert values["why"] == "the run is finished"
    await world.until("closed", True)
    assert world.audit().closed
    with pytest.raises(Refused, match="over"):
        await cast.trainer.join()
    assert world.stop() == 0


async def test_no_group_is_started_that_no_step_can_train(short_dir: Path) -> None:
    with closing(World(short_dir / "run", config(steps=2))) as world:
        world.start()
        cast = await Cast(world, capacity=100).enter()
        await cast.finish(2)
        batch = await cast.trainer.next_batch(0)
        await cast.trainer.publish(1, batch.batch)
        assigns = await cast.instance.until_held(2)
        await cast.shard.operate(cast.shard.push(assigns[0], cast.instance.worker))
        await cast.shard.operate(cast.shard.release(assigns[0], ReleaseWhy.FILTERED))
        cast.instance.let_go(assigns[:1])
        await cast.instance.until_held(2)  # they replace the filtered one
        await cast.instance.report()
        assert len(cast.instance.held) == 2  # the window has room for four
        await cast.finish(2)
        batch = await cast.trainer.next_batch(1)
        await cast.trainer.publish(2, batch.batch)
        await cast.instance.report()
        assert cast.instance.held == {}
        beyond = asyncio.ensure_future(cast.trainer.next_batch(2))  # the step can be trained after all
        await cast.finish(2)
        assert (await beyond).step == 2


async def test_only_the_trainer_in_charge_may_finish(world: World) -> None:
    cast = await Cast(world).enter()
    with pytest.raises(Refused) as refused:
        await cast.trainer.client.ask(Finished(trainer_term=TrainerTerm(0)), Done)
    assert refused.value.code is Code.FENCED
    assert not (await world.status())["finished"]


async def test_a_drain_keeps_what_is_there_and_starts_nothing(world: World) -> None:
    cast = await Cast(world).enter()
    assigns = await cast.instance.until_held(4)
    await cast.trainer.client.ask(Drain(why="upgrade"), Done)
    await cast.finish(2)
    await cast.instance.report()
    assert not cast.instance.drain, "its other groups are still to be finished"
    assert set(cast.instance.held) == {assign.lease for assign in assigns[2:]}
    await cast.finish(2)
    await cast.instance.report()
    assert cast.instance.drain
    assert cast.instance.held == {}


async def test_a_step_long_gone_is_not_waited_for(world: World) -> None:
    cast = await Cast(world).enter()
    await cast.finish(2)
    batch = await cast.trainer.next_batch(0)
    await cast.trainer.publish(1, batch.batch)
    with pytest.raises(Refused) as refused:
        await cast.trainer.client.call(GetBatch(trainer_term=cast.trainer.term, step=Step(0)))
    assert refused.value.code is Code.STALE


async def test_the_name_of_a_supervised_process_goes_only_to_another_one_of_the_supervisor(world: World) -> None:
    """An unsupervised process under the name would end the run: the supervised one would leave and restart."""
    await Cast(world).enter()
    supervised = Someone(world, "rollout-7", "rollout", capacity=1)
    await supervised.attach()
    by_hand = Someone(world, "rollout-7", "rollout", capacity=1, slot="")
    with pytest.raises(Refused, match=r"rollout-7 belongs to the supervisor of this run, .* another name") as refused:
        await by_hand.attach()
    assert refused.value.code is Code.CONFLICT
    await supervised.attach()  # the supervised one still has the name
    again = Someone(world, "rollout-7", "rollout", capacity=1)
    await again.attach()
    await again.client.ask(Detach(worker=again.worker, why="goodbye"), Done)
    await by_hand.attach()


async def test_a_name_that_no_supervisor_looks_after_goes_to_whoever_comes(world: World) -> None:
    await Cast(world).enter()
    supervised = Someone(world, "rollout-7", "rollout", capacity=1)
    await supervised.attach()
    supervised.client.close()
    world.kill()
    world.start()
    by_hand = Someone(world, "rollout-7", "rollout", capacity=1, slot="")
    await by_hand.attach()  # the supervised one has sent nothing since
    by_hand.client.close()
    await Someone(world, "rollout-7", "rollout", capacity=1, slot="").attach()
