"""The scheduler's view of groups in stages is the newest report of each shard, limited to configured stages."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from staleflow.configs.schema import Config, Environment, Prompts, Reward, Rollout, Stage
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, WorkerId
from staleflow.protocols.wire.messages import Done, InstanceStats, StageFailing, StageLoad, StageLoads
from staleflow.servers.scheduler.workers.stage_loads import Load, StageLoadTable, calls_limit, episodes_limit
from tests.servers.scheduler.world import Cast, World


class Heard:
    """Fake of ``PendingReplies`` that keeps the replies."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def add(self, call: object, reply: object) -> None:
        self.said.append(reply)

    def refuse(self, call: object, code: Code, detail: str) -> None:
        self.said.append((code, detail))


def load(stage: str, waiting: int, taken: int, *groups: int) -> StageLoad:
    return StageLoad(stage=stage, waiting=waiting, taken=taken, groups=[GroupId(group) for group in groups])


def told(loads: StageLoadTable, shard: int, *given: StageLoad) -> None:
    call: Any = None
    loads.report(call, StageLoads(shard=shard, loads=list(given), used_share=0.25))


def test_the_newest_word_of_each_shard_counts_and_shards_add_up() -> None:
    heard: Any = Heard()
    loads = StageLoadTable(2, ("reward", "judge"), heard)
    told(loads, 0, load("judge", 9, 9, 1))
    told(loads, 0, load("reward", 1, 0, 4), load("judge", 2, 1, 7, 4))
    told(loads, 1, load("judge", 3, 0, 5))
    assert heard.said == [Done()] * 3
    assert loads.by_stage() == {"reward": Load(1, 0), "judge": Load(5, 1)}
    assert [loads.of_group(GroupId(group)) for group in (4, 5, 1)] == [["reward", "judge"], ["judge"], []]
    assert [shard.used_share for shard in loads.shards] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("shard", "given"), [(2, []), (-1, []), (0, [load("critic", 1, 0)]), (0, [load("judge", 1, 0, *range(257))])]
)
def test_a_report_of_no_shard_or_of_no_stage_changes_nothing(shard: int, given: list[StageLoad]) -> None:
    heard: Any = Heard()
    loads = StageLoadTable(2, ("reward", "judge"), heard)
    told(loads, shard, *given)
    assert [code for code, _ in heard.said] == [Code.MALFORMED]
    assert loads.by_stage() == {}


def config(group_size: int = 8) -> Config:
    return Config(
        prompts=Prompts(),
        reward=Reward(run="m:f"),
        stage=[Stage(name="judge", run="m:f", makes=["score"])],
        rollout=Rollout(group_size=group_size),
    )


@pytest.mark.parametrize(
    ("stage", "load", "workers", "says"),
    [
        ("reward", Load(20, 8, 64), 1, "64 of 64 calls under way, 20 groups queued; raise reward.concurrency"),
        ("reward", Load(0, 16, 64), 1, "64 of 64 calls under way, 8 groups queued; raise reward.concurrency"),
        ("reward", Load(1, 16, 2), 2, "2 of 2 calls under way, 16 groups queued; raise reward.workers, or make it an"),
        ("judge", Load(1, 32, 32), 1, "32 of 32 calls under way, 1 group queued; raise stage[0].concurrency or stage"),
    ],
)
def test_a_stage_that_has_all_its_calls_under_way_is_the_limit_and_names_its_keys(
    stage: str, load: Load, workers: int, says: str
) -> None:
    assert calls_limit(config(), stage, load, workers).startswith(f"stage {stage}: {says}")


@pytest.mark.parametrize(
    ("stage", "load"), [("reward", Load(20, 7, 64)), ("reward", Load(0, 8, 64)), ("judge", Load(9, 16, 0))]
)
def test_a_stage_with_fewer_calls_or_nothing_queued_is_no_limit(stage: str, load: Load) -> None:
    assert calls_limit(config(), stage, load, 1) == ""


FULL = InstanceStats(running=3, slots=64, episodes=8, episodes_waiting=24)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "; raise environment.concurrency or environment.processes"),
        ({"episodes_waiting": 0}, ""),
        ({"running": 64}, ""),
        ({"waiting": 1}, ""),
        ({"slots": 0, "running": 64}, ""),
        ({"episodes": 2}, "; fewer episodes share a process because episodes crash it, see the log of rollout-0"),
    ],
    ids=["full", "nothing queued", "no free slot", "the engine is full", "slots unknown", "episodes end processes"],
)
def test_an_environment_is_the_limit_when_episodes_wait_while_the_engine_has_free_slots(
    changed: dict[str, int], says: str
) -> None:
    settings = Config(
        prompts=Prompts(),
        reward=Reward(run=""),
        environment=Environment(run="m:C", processes=2, concurrency=4),
        rollout=Rollout(max_inflight=64),
    )
    stats = msgspec.structs.replace(FULL, **changed)
    said = f"environment at rollout-0: {stats.episodes} of 8 episodes under way, 24 queued"
    assert episodes_limit(settings, "rollout-0", stats) == (said + says if says else "")


def failing(worker: str, failures: int, failing_ms: int) -> StageFailing:
    return StageFailing(worker=WorkerId(worker), failures=failures, failing_ms=failing_ms, held_ms=500, why="refused")


def test_workers_that_fail_everything_are_known_by_their_longest_report() -> None:
    heard: Any = Heard()
    loads = StageLoadTable(2, ("reward", "judge"), heard)
    mine = msgspec.structs.replace(load("judge", 1, 0), failing=[failing("a", 3, 100), failing("b", 4, 70_000)])
    told(loads, 0, mine)
    told(loads, 1, msgspec.structs.replace(mine, failing=[failing("a", 9, 61_000)]))
    assert {one.worker: one.failures for one in loads.failing()["judge"]} == {"a": 9, "b": 4}
    assert loads.all_fail(Counter(judge=3, reward=1), 60_000) is None, "a third one does its work"
    found = loads.all_fail(Counter(judge=2, reward=1), 60_000)
    assert found is not None
    assert (found[0], found[1].worker) == ("judge", "a")
    assert loads.all_fail(Counter(judge=2), 65_000) is None
    told(loads, 0)
    told(loads, 1)
    assert loads.failing() == {}


async def test_a_group_that_pins_a_step_is_said_to_be_in_its_stage(world: World) -> None:
    cast = await Cast(world, capacity=100).enter()
    old = await cast.instance.until_held(4)
    await cast.shard.finish(old[:2], cast.instance.worker)
    cast.instance.let_go(old)
    batch = await cast.trainer.next_batch(0)
    await cast.shard.operate(*(cast.shard.push(assign, cast.instance.worker) for assign in old[2:]))
    await cast.trainer.publish(1, batch.batch)
    newer = await cast.instance.until_held(2)
    await cast.shard.finish(newer[:2], cast.instance.worker)
    said = f"step 1 waits for 2 groups of version 0 ({old[3].group} and {old[2].group}), in "
    await world.until("why", f"{said}stages; policy: wait")
    report = StageLoads(shard=0, loads=[load("reward", 2, 0, old[2].group, old[3].group)], used_share=0.25)
    await cast.shard.client.ask(report, Done)
    values = await world.until("why", f"{said}the stage reward; policy: wait")
    assert [group["stages"] for group in values["pinned"]["groups"]] == [["reward"]] * 2
    assert values["shards"][0] == {"shard": 0, "used_share": 0.25, "full": ""}
