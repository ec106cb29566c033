"""A run that can never progress is reported with its reason, and the trainer is ended if the deadlock is certain."""

from pathlib import Path

import msgspec
import pytest

from staleflow.configs.algorithm import Algorithm
from staleflow.configs.schema import Config, Prompts, Stage
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import Step, WorkerId
from staleflow.protocols.wire.messages import GetBatch, Refusal, Reply, StageFailing, StageLoad, StageLoads
from staleflow.servers.scheduler.coordination.backoff import HOLD_AFTER, MAX_TRIES
from staleflow.servers.scheduler.status.deadlock import FAILED_BATCHES, MIN_FAILING_MS, MIN_FAILURES
from tests.servers.scheduler.table import TICK_MS, Seat, Table
from tests.servers.scheduler.world import config

LONG = "group {}: the prompt has 3000 tokens; the model's context is 2048"


def finite(epochs: int = 1) -> Config:
    """Return a configuration with batches of two groups, staleness 1 and a source of ``epochs`` epochs."""
    return msgspec.structs.replace(config(), prompts=Prompts(source="nobody:opens", epochs=epochs))


def refuse(seat: Seat, group: int) -> str:
    """Release a group as one that the engine can never serve; return the refusal's detail."""
    assign = seat.assign(group)
    del seat.held[assign.lease]
    seat.table.release(assign, ReleaseWhy.ABORTED, seat.name, detail=LONG.format(group), hopeless=True)
    seat.report()
    return LONG.format(group)


def train(seat: Seat, steps: int) -> None:
    """Generate and train whole steps, as long as prompts remain."""
    machine = seat.table.interpreter.machine
    for _ in range(steps):
        seat.report()
        while seat.held and machine.sealed_batch(Step(machine.version)) is None:
            seat.finish(seat.holds()[0])
        seat.table.train()


def passes(seat: Seat, ms: int) -> None:
    """Let time pass while a worker reports."""
    for _ in range(0, ms, min(ms, 5_000)):
        seat.table.after(min(ms, 5_000))
        seat.report()


def told(table: Table) -> str:
    """Return the refusal that the waiting trainer receives, or ""."""
    table.wait_for_batch()
    table.after(TICK_MS)
    assert all(refusal.code is Code.DENIED for refusal in table.refused)
    return table.refused[0].detail if table.refused else ""


def test_prompts_that_are_used_up_end_the_run_and_say_what_to_change(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", finite(), rows=5)
    seat = Seat(table, "a")
    train(seat, 2)
    seat.report()
    seat.finish(seat.holds()[0])
    why = (
        "step 2 can never be trained: 1 of 2 groups are ready and the prompts are used up: 1 x 5. Possible fixes: "
        "raise prompts.epochs (0 repeats the prompts without end), or lower trainer.steps from 100 to 2, or set "
        'rollout.filter to "none"'
    )
    assert told(table) == why
    assert table.why == why
    table.close()


def test_a_filter_that_the_advantage_does_without_is_no_way_out(tmp_path: Path) -> None:
    settings = finite()
    settings = msgspec.structs.replace(
        settings, trainer=msgspec.structs.replace(settings.trainer, algorithm=Algorithm(advantage="reinforce_pp"))
    )
    table = Table(tmp_path / "run", settings, rows=3)
    seat = Seat(table, "a")
    train(seat, 1)
    seat.report()
    seat.finish(seat.holds()[0])
    assert told(table).endswith(
        "raise prompts.epochs (0 repeats the prompts without end), or lower trainer.steps from 100 to 1"
    )
    table.close()


def test_it_is_said_where_the_prompts_went(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", finite(), rows=4)
    seat = Seat(table, "a")
    for group in seat.holds()[:3]:
        assign = seat.assign(group)
        assert table.push(assign, "a") is None
        table.release(assign, ReleaseWhy.FILTERED, "trajectories-0")
        del seat.held[assign.lease]
    seat.finish(seat.holds()[0])
    assert "1 of 2 groups are ready and the prompts are used up: 1 x 4, 3 filtered. Possible fixes:" in told(table)


def test_while_a_group_is_under_way_nothing_is_certain(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", finite(), rows=3)
    seat = Seat(table, "a")
    train(seat, 1)
    seat.report()
    (last,) = seat.held.values()
    assert told(table) == ""
    assert table.push(last, "a") is None
    assert told(table) == "", "its reward may be all that is missing"
    table.occupy(last)
    table.after(TICK_MS)
    assert len(table.refused) == 2, "both ranks that waited"


def test_a_trainer_that_still_trains_is_told_when_it_is_done(tmp_path: Path) -> None:
    """The trainer requests one step ahead; the batch that it already has counts as under way."""
    table = Table(tmp_path / "run", finite(), rows=2)
    seat = Seat(table, "a")
    for group in seat.holds():
        seat.finish(group)
    ahead = GetBatch(trainer_term=table.term, step=Step(1), wait_ms=60_000)
    told: list[Reply] = []
    table.call("trainer", ahead, told.append)
    table.after(500)
    assert told == []
    table.train()
    table.after(TICK_MS)
    assert [type(answer) for answer in told] == [Refusal]


def test_an_instance_that_refuses_everything_ends_the_run(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(), rows=6)
    seat = Seat(table, "a", capacity=2)
    said = [refuse(seat, seat.holds()[0]) for _ in range(5)]
    assert told(table) == ""
    assert table.why.startswith(f"workers gave up each of the last 5 groups, the newest: {said[-1]}; step 0 waits for ")
    refuse(seat, seat.holds()[0])
    table.after(TICK_MS)
    assert table.refused == [], "two are under way, and may be pushed after all"
    begun = table.interpreter.totals.counts.reserves
    last = [refuse(seat, group) for group in seat.holds()][-1]
    assert table.interpreter.totals.counts.reserves == begun, "nothing begins meanwhile"
    table.after(TICK_MS)
    assert [refusal.detail for refusal in table.refused] == [
        "step 0 can never be trained: 0 of 2 groups are ready and every instance refuses every prompt, 6 in a row. "
        f"The newest: {last}. Correct or leave out such prompts, or give the engine a longer context"
    ]


def test_an_instance_that_has_refused_nothing_may_serve_what_the_others_refuse(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(), rows=6)
    seat = Seat(table, "a", capacity=2)
    Seat(table, "b", capacity=1).report()
    assert told(table) == ""
    for _ in range(20):
        for group in seat.holds():
            refuse(seat, group)
        table.after(2_000)
        seat.report()
    assert table.interpreter.totals.counts.releases["aborted"] > HOLD_AFTER
    assert table.refused == []
    assert table.service.phase.suspected == ""


def test_one_push_shows_that_not_everything_is_refused(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(), rows=6)
    seat = Seat(table, "a", capacity=2)
    for _ in range(20):
        for _ in range(4):
            refuse(seat, seat.holds()[0])
        pushed = seat.held[max(seat.held)]
        table.push(pushed, "a")
        table.release(pushed, ReleaseWhy.FILTERED, "trajectories-0")
        del seat.held[pushed.lease]
        seat.report()
    assert told(table) == ""


def test_when_the_only_prompt_left_fails_again_and_again_it_is_given_up_and_the_run_ends(tmp_path: Path) -> None:
    """One epoch with one prompt that is too long: the prompt returns once all others are trained."""
    table = Table(tmp_path / "run", finite(), rows=5)
    seat = Seat(table, "a")
    bad = seat.holds()[0]
    refuse(seat, bad)
    for _ in range(4):
        seat.report()
        seat.finish(next(group for group in seat.holds() if group != bad))
    table.train()
    table.train()
    seat.report()
    for count in range(1, MAX_TRIES):
        assert told(table) == "", count
        passes(seat, 3 * TICK_MS)
        refuse(seat, bad)
    table.after(TICK_MS)
    assert table.refused[0].detail.startswith(
        "step 2 can never be trained: 0 of 2 groups are ready and the prompts are used up: 1 x 5, 1 given up after they"
        f" failed (the newest: {LONG.format(bad)}). Possible fixes: "
    )


def test_when_every_prompt_that_is_left_fails_the_run_ends_though_none_is_given_up(tmp_path: Path) -> None:
    """Enough groups fail that the instance may be at fault as well as the prompts: no failure counts as a try."""
    rows = HOLD_AFTER + 4
    table = Table(tmp_path / "run", finite(), rows=rows)
    seat = Seat(table, "a", capacity=2)
    train(seat, 2)
    seat.report()
    table.wait_for_batch()
    failures = 0
    while not table.refused and failures < 500:
        for group in seat.holds():
            refuse(seat, group)
            failures += 1
        table.after(TICK_MS)
        seat.report()
    assert table.refused[0].detail.startswith(
        "step 2 can never be trained: 0 of 2 groups are ready and each prompt that is left, 8, failed 5 times. The "
    )
    assert failures >= 8 * MIN_FAILURES


def test_a_filter_that_keeps_nothing_is_named_and_does_not_end_the_run(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    through_the_shard(seat, 16, ReleaseWhy.FILTERED)
    assert told(table) == ""
    assert table.why.partition("; step 0 waits for groups: ")[0] == (
        'the filter "zero_spread" kept none of the last 16 groups: the samples of each had the same reward; easier or '
        "harder prompts, a larger rollout.group_size, a higher rollout.temperature, or "
        'rollout.filter = "none"'
    )
    seat.finish(seat.holds()[0])
    assert "filter" not in table.why


def through_the_shard(seat: Seat, count: int, why: ReleaseWhy, detail: str = "") -> None:
    """Push groups and then release them."""
    for _ in range(count):
        seat.report()
        assign = seat.assign(seat.holds()[0])
        assert seat.table.push(assign, seat.name) is None
        seat.table.release(assign, why, "trajectories-0", detail=detail)
        del seat.held[assign.lease]


def test_rewards_that_all_fail_are_named(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    through_the_shard(seat, 1, ReleaseWhy.ABORTED, "reward: ZeroDivisionError: division by zero")
    assert "failed" not in table.why
    through_the_shard(seat, 2, ReleaseWhy.ABORTED, "reward: ZeroDivisionError: division by zero")
    assert told(table) == ""
    assert table.why.startswith(
        "each of the last 3 groups failed, the newest: reward: ZeroDivisionError: division by zero; step 0 waits for "
    )


MANY_FAILED = 2 * FAILED_BATCHES
BAD = "reward: the reward is 'good'; it must be a number"


def test_rewards_that_fail_from_the_beginning_on_end_the_run_with_the_newest_reason(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    through_the_shard(seat, MANY_FAILED, ReleaseWhy.ABORTED, BAD)
    assert told(table) == "", "what the reward needs may still be starting"
    passes(seat, MIN_FAILING_MS)
    table.refused.clear()
    assert told(table) == "", "four groups are under way, and one of them may have a reward"
    begun = table.interpreter.totals.counts.reserves
    through_the_shard(seat, 4, ReleaseWhy.ABORTED, BAD)
    assert table.interpreter.totals.counts.reserves == begun, "nothing begins meanwhile"
    table.after(TICK_MS)
    assert table.refused[0].detail == (
        f"step 0 can never be trained: every group fails in a stage, {MANY_FAILED + 4} so far and none succeeded. The "
        f"newest: {BAD}. More in logs/ of the run directory"
    )


def test_a_group_under_way_that_has_its_reward_clears_the_suspicion(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    through_the_shard(seat, MANY_FAILED, ReleaseWhy.ABORTED, BAD)
    passes(seat, MIN_FAILING_MS)
    assert told(table) == ""
    seat.finish(seat.holds()[0])
    for _ in range(3):
        through_the_shard(seat, 1, ReleaseWhy.ABORTED, BAD)
        table.after(TICK_MS)
    assert table.refused == []
    seat.report()
    assert len(seat.held) == 3, "new groups begin again, as many as the window admits"


def test_few_failures_however_old_end_nothing(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    through_the_shard(seat, MANY_FAILED - 1, ReleaseWhy.ABORTED, BAD)
    table.after(MIN_FAILING_MS)
    assert told(table) == ""


@pytest.mark.parametrize(
    ("before", "failing_ms", "workers", "ends"),
    [
        (None, MIN_FAILING_MS, 1, True),
        (None, MIN_FAILING_MS - 1, 1, False),
        (None, MIN_FAILING_MS, 2, False),
        (ReleaseWhy.FILTERED, MIN_FAILING_MS, 1, False),
    ],
    ids=["all of a minute", "not yet", "another works", "one came through"],
)
def test_a_stage_whose_workers_fail_everything_from_the_beginning_on_ends_the_run(
    tmp_path: Path, before: ReleaseWhy | None, failing_ms: int, workers: int, ends: bool
) -> None:
    """Failing workers are held, so few groups are given up. Pushed groups wait forever, and do not delay the end."""
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    if before is not None:
        through_the_shard(seat, 1, before)
    for number in range(workers):
        table.attach(f"reward-{number}.5f0c", "stage", name=f"reward-{number}", stage="reward")
    failing = StageFailing(
        worker=WorkerId("reward-0.5f0c"), failures=40, failing_ms=failing_ms, held_ms=9_000, why="judge: refused"
    )
    load = StageLoad(stage="reward", waiting=9, taken=0, groups=[], failing=[failing])
    table.call("trajectories-0", StageLoads(shard=0, loads=[load], used_share=0.1), lambda _: None)
    assert "reward-0 fails every group of the stage reward, 40 in a row, and is held: judge: refused" in table.why
    said = (
        "step 0 can never be trained: every group fails in the stage reward at reward-0, 40 so far and none succeeded. "
        "The newest: judge: refused. "
    )
    assert told(table) == "", "four groups are under way, and one of them may be filtered or have a reward"
    assert table.service.phase.suspected.startswith(said) == ends
    begun = table.interpreter.totals.counts.reserves
    through_the_shard(seat, 1, ReleaseWhy.ABORTED, "judge: refused")
    seat.report()
    assert (table.interpreter.totals.counts.reserves == begun) == ends, "nothing begins meanwhile"
    for assign in list(seat.held.values()):
        assert table.push(assign, "a") is None
        del seat.held[assign.lease]
    table.after(TICK_MS)
    assert [refusal.detail.startswith(said) for refusal in table.refused] == [True] * ends


def test_a_group_that_has_passed_the_failing_stage_delays_the_end(tmp_path: Path) -> None:
    """A later stage may be slow: once it has finished the group, the run is healthy, however long the outage was."""
    judge = Stage(name="judge", run="m:f", makes=["score"])
    table = Table(tmp_path / "run", msgspec.structs.replace(config(), stage=[judge]))
    seat = Seat(table, "a")
    table.attach("judge-0", "stage", stage="judge")
    failing = StageFailing(
        worker=WorkerId("judge-0"), failures=40, failing_ms=MIN_FAILING_MS, held_ms=9_000, why="judge: refused"
    )

    def report(passed: int) -> None:
        load = StageLoad(stage="judge", waiting=3, taken=0, groups=[], failing=[failing], passed=passed)
        table.call("trajectories-0", StageLoads(shard=0, loads=[load], used_share=0.1), lambda _: None)

    for assign in list(seat.held.values()):
        assert table.push(assign, "a") is None
        del seat.held[assign.lease]
    report(passed=1)
    assert told(table) == ""
    assert table.service.phase.suspected == ""
    report(passed=0)
    table.after(TICK_MS)
    assert "every group fails in the stage judge at judge-0, 40 so far" in table.refused[0].detail


@pytest.mark.parametrize("restarted", [False, True])
def test_one_group_that_had_its_reward_shows_that_failures_pass(tmp_path: Path, restarted: bool) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    seat.finish(seat.holds()[0])
    if restarted:
        table.restart()
        table.attach("trajectories-0", "trajectories", endpoint="ipc:///none", rows=1000, prompts_sha="p")
    through_the_shard(seat, MANY_FAILED, ReleaseWhy.ABORTED, BAD)
    table.after(MIN_FAILING_MS)
    assert told(table) == ""


@pytest.mark.parametrize("pushed", [0, 1])
def test_an_environment_that_fails_from_the_beginning_on_ends_the_run_too(tmp_path: Path, pushed: int) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    through_the_shard(seat, pushed, ReleaseWhy.FILTERED)
    for _ in range(MIN_FAILING_MS // 1_000 + 1):
        for assign in list(seat.held.values()):
            del seat.held[assign.lease]
            table.release(assign, ReleaseWhy.ABORTED, "a", detail=f"group {assign.group}: the environment raised")
        table.after(1_000)
        seat.report()
    for assign in list(seat.held.values()):
        del seat.held[assign.lease]
        table.release(assign, ReleaseWhy.ABORTED, "a", detail=f"group {assign.group}: the environment raised")
    assert ("rollout workers give up every group" in told(table)) == (not pushed)


def test_a_pinning_group_whose_instance_is_silent_says_so(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a", capacity=8)
    slow, *others = list(seat.held.values())
    for assign in others[:2]:
        seat.finish(assign.group)
    table.train()
    seat.report()
    for group in [group for group in seat.holds() if group != slow.group][:2]:
        seat.finish(group)
    assert table.why == f"step 1 waits for group {slow.group} of version 0, on a; policy: wait"
    table.silent("a")
    assert table.why == "no rollout worker is attached"
    Seat(table, "b")
    assert table.why == (
        f"step 1 waits for group {slow.group} of version 0, on a, which is silent: its lease ends within 30 s; "
        "policy: wait"
    )


@pytest.mark.parametrize("trained", [0, 1])
def test_a_restarted_scheduler_comes_to_the_same_end(tmp_path: Path, trained: int) -> None:
    table = Table(tmp_path / "run", finite(), rows=2 * trained + 1)
    seat = Seat(table, "a")
    train(seat, trained)
    seat.report()
    seat.finish(seat.holds()[0])
    table.restart()
    table.attach("trajectories-0", "trajectories", endpoint="ipc:///none", rows=2 * trained + 1, prompts_sha="p")
    assert f"step {trained} can never be trained: 1 of 2 groups are ready" in told(table)
