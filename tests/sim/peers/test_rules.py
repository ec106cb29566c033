"""Each peer follows its documented rule on a workload whose long trajectories take several steps of the trainer."""

from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config, Redundancy
from staleflow.configs.simulation import Occurrence
from staleflow.protocols.consistency.ids import Version
from staleflow.sim.peers import laminar
from staleflow.sim.peers.pool import Group, Pool, Replica
from staleflow.sim.peers.presets import PEERS
from staleflow.sim.peers.run import PeerRun, simulate_peer
from staleflow.sim.world import World
from tests.sim.configs import config

EXACT = ("nemo-rl", "stitch", "forge")
HARD = ("sync", "psrl", *EXACT, "prime-rl", "slime", "roll-agentic", "trl")
LOSSLESS = ("sync", "psrl", *EXACT, "areal", "verl", "slime", "laminar")


def tail(**settings: Any) -> Config:
    """Batches of four trajectories; 0.5 s a step; a trajectory takes 0.6 s on average, and 4 s at most."""
    given: dict[str, Any] = {"steps": 40, "group_size": 1, "train_s": 0.5, **settings}
    return config(**given)


def redundant(of: Config, *, groups: float = 1.0, samples: float = 1.0) -> Config:
    rollout = msgspec.structs.replace(of.rollout, redundancy=Redundancy(groups=groups, samples=samples))
    return msgspec.structs.replace(of, rollout=rollout)


def ran(name: str, of: Config) -> PeerRun:
    run = PeerRun(of, name)
    run.run()
    assert len(run.rows) == of.trainer.steps
    return run


def ages(run: PeerRun) -> list[int]:
    """Staleness of every trained group, by its oldest token."""
    return [step - group.oldest() for step, batch in enumerate(run.pool.steps) for group in batch]


def lost(run: PeerRun) -> list[Group]:
    pool = run.pool
    kept = {*pool.running, *pool.finished, *(group for batch in pool.steps for group in batch)}
    return [group for group in pool.started if group not in kept]


def began(run: PeerRun, count: int) -> list[Group]:
    for _ in range(count):
        run.pool.begin()
    return run.pool.started


# --- every peer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("publish", ["end", "start"])
@pytest.mark.parametrize("bound", [1, 3])
def test_a_peer_with_a_hard_bound_never_trains_a_token_beyond_it(name: str, publish: str, bound: int) -> None:
    run = ran(name, tail(max_staleness=bound, publish=publish, pull_s=0.1))
    assert max(ages(run)) <= bound


@pytest.mark.parametrize("name", [name for name in PEERS if name not in HARD])
def test_a_peer_without_one_trains_long_trajectories_beyond_it(name: str) -> None:
    assert max(ages(ran(name, tail(steps=100)))) > 3


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_throws_tokens_away_or_it_does_not(name: str) -> None:
    run = ran(name, tail())
    assert (run.pool.lost_tokens > 0, bool(lost(run))) == (name not in LOSSLESS,) * 2


@pytest.mark.parametrize("name", PEERS)
def test_every_token_is_trained_or_lost_or_filtered_or_still_there(name: str) -> None:
    world = {"pull_s": 0.2, "load_s": 0.05, "reward_s": 0.1, "prefill_s": 1e-4, "prompt_tokens": 20}
    of = tail(group_size=2, engines=3, slots=6, kv_tokens=1500, filter_share=0.2, **world)
    run = ran(name, redundant(of, samples=1.5))
    pool = run.pool
    trained = sum(sample.written for batch in pool.steps for group in batch for sample in group.written)
    there = sum(pool.tokens(group) for group in (*pool.running, *pool.finished))
    generated = sum(replica.engine.state().generated for replica in pool.replicas)
    begun = sum(len(group.samples) for group in pool.started)
    assert pool.filtered_tokens > 0
    # an aborted sample leaves at the end of the current step, with one more token
    assert 0 <= generated - (trained + there + pool.lost_tokens + pool.filtered_tokens) <= begun


@pytest.mark.parametrize("name", PEERS)
def test_the_same_seed_is_the_same_run_and_another_one_is_not(name: str) -> None:
    runs = [simulate_peer(name, tail(steps=10, seed=seed)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("name", PEERS)
def test_a_run_ends_with_its_prompts(name: str) -> None:
    of = tail(rows=10)
    run = PeerRun(msgspec.structs.replace(of, prompts=msgspec.structs.replace(of.prompts, epochs=1)), name)
    run.run()
    assert sorted(group.id for group in run.pool.started) == list(range(10))
    assert len(run.rows) == 2 or (name not in LOSSLESS and len(run.rows) == (10 - len(lost(run))) // 4)


def test_a_group_goes_to_the_engine_with_the_fewest_samples_or_the_first_of_these() -> None:
    groups = began(PeerRun(tail(engines=3, group_size=2), "areal"), 4)
    assert [group.replica.number for group in groups] == [0, 1, 2, 0]


def test_an_engine_that_never_has_anything_to_do_is_idle_all_the_time() -> None:
    result = simulate_peer("sync", tail(engines=5))
    assert (result.engines[4].busy_s, result.engine_idle > 0.2) == (0.0, True)


def test_a_run_may_end_by_its_time() -> None:
    result = simulate_peer("areal", tail(steps=1000), seconds=10.0)
    assert (result.seconds, len(result.steps) < 20) == (10.0, True)


def test_a_prompt_that_no_engine_can_hold_is_said() -> None:
    with pytest.raises(ConfigError, match="kv_tokens"):
        simulate_peer("psrl", tail(kv_tokens=100))


def test_engines_of_peers_never_fail() -> None:
    crash = Occurrence(at_s=1.0, engine=0, what="crash")
    with pytest.raises(ConfigError, match=r"simulation\.events"):
        simulate_peer("psrl", tail(events=[crash]))


def test_a_peer_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="areal"):
        simulate_peer("arael", tail())


# --- synchronous ------------------------------------------------------------------------------------------------------


def test_a_synchronous_step_takes_its_longest_trajectory_and_then_the_training() -> None:
    run = ran("sync", tail(steps=8))
    took = [after.ended_s - before.ended_s for before, after in pairwise(run.rows)]
    longest = [max(group.written[0].length for group in batch) for batch in run.pool.steps]
    assert took == pytest.approx([0.01 * tokens + 0.5 for tokens in longest[1:]])
    assert set(ages(run)) == {0}


# --- PSRL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("publish", ["end", "start"])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_psrl_trains_what_the_shipped_service_trains(publish: str, bound: int, tmp_path: Path) -> None:
    of = tail(max_staleness=bound, publish=publish)
    run = ran("psrl", of)
    with closing(World(of, tmp_path)) as world:
        world.run()
    theirs = [[member.group for member in step.batch.members] for step in world.trainer.trained]
    # within a batch, groups finish in any order: engines that load one after the other may shift it by a step
    assert [sorted(group.id for group in batch) for batch in run.pool.steps] == [sorted(batch) for batch in theirs]
    assert [row.ended_s for row in run.rows] == pytest.approx(
        [step.ended_s for step in world.trainer.trained], abs=0.05
    )


# --- AReaL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, 2])
def test_areal_begins_up_to_the_bound_plus_version_plus_one_batches_and_no_group_more(bound: int) -> None:
    run = ran("areal", tail(max_staleness=bound))
    room = [group.number - (bound + group.version + 1) * 4 for group in run.pool.started]
    assert max(room) == 0
    assert room.count(0) == 40  # the limit is reached at every version


def test_areal_trains_the_groups_that_began_first_of_those_that_are_done() -> None:
    run = PeerRun(tail(batch_size=2), "areal")
    first, second, third = began(run, 3)
    for group in (third, second, first):
        run.rule.arrived(group)
    assert run.rule.batch() == [first, second]


# --- NeMo-RL and Stitch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nemo-rl", "stitch"])
def test_each_step_trains_the_groups_that_started_for_it(name: str) -> None:
    run = ran(name, tail(max_staleness=2, pull_s=0.1))
    numbers = [sorted(group.number for group in batch) for batch in run.pool.steps]
    assert numbers == [list(range(4 * step + 1, 4 * step + 5)) for step in range(40)]
    assert max(ages(run)) == 2


def test_nemo_rl_has_at_most_the_bound_times_a_batch_in_flight_and_starts_nothing_during_a_refit() -> None:
    run = PeerRun(tail(max_staleness=2, pull_s=0.3), "nemo-rl")
    run.run(seconds=0.301)
    assert len(run.pool.running) == 8
    assert all(group.replica.version == 0 for group in run.pool.started)


def test_nemo_rl_replaces_a_filtered_group_for_the_same_step() -> None:
    run = ran("nemo-rl", tail(filter_share=0.3))
    assert run.pool.filtered_tokens > 0
    assert max(ages(run)) == 1


def test_stitch_writes_each_group_with_one_version_and_nemo_rl_does_not() -> None:
    def segments(name: str) -> set[int]:
        run = ran(name, tail(max_staleness=2, pull_s=0.1))
        return {len(group.written[0].segments) for batch in run.pool.steps for group in batch}

    assert segments("stitch") == {1}
    assert segments("nemo-rl") > {1}


# --- Forge ------------------------------------------------------------------------------------------------------------


def test_forge_passes_over_a_slow_group_inside_its_window_and_stops_at_the_end_of_it() -> None:
    run = PeerRun(tail(max_staleness=2), "forge")
    run.rule.published()
    run.pool.version = Version(0)
    for replica in run.pool.replicas:
        replica.version = Version(0)
    run.rule.begin()
    slow, *others = run.pool.started
    assert len(others) == 7  # two batches in all
    for group in reversed(others):
        run.rule.arrived(group)
    assert run.rule.batch() == others[:4]
    assert run.rule.batch() == ()
    run.rule.arrived(slow)
    assert run.rule.batch() == [slow, *others[4:]]


def test_forge_is_strict_fifo_at_a_bound_of_one() -> None:
    run = ran("forge", tail())
    numbers = [group.number for batch in run.pool.steps for group in batch]
    assert numbers == list(range(1, 161))


# --- prime-rl ---------------------------------------------------------------------------------------------------------


def test_prime_rl_collects_one_batch_ahead_of_the_trainer_and_begins_nothing_beyond_it() -> None:
    run = PeerRun(tail(train_s=1000.0), "prime-rl")
    run.run(seconds=900.0)
    assert (run.pool.step, len(run.rule.batch()), run.rule.batch()) == (1, 4, ())
    assert not run.pool.running
    assert len(run.pool.started) <= 4 + 4 + 8 - 1


def test_prime_rl_cancels_at_a_version_what_could_not_be_trained_any_more() -> None:
    run = ran("prime-rl", tail())
    cancelled = [group for group in lost(run) if len(group.written) < 1]
    assert cancelled
    assert {group.version for group in run.pool.running} <= {run.pool.version, run.pool.version - 1}


# --- verl -------------------------------------------------------------------------------------------------------------


def test_verl_begins_a_window_of_groups_between_two_synchronisations() -> None:
    run = ran("verl", tail(max_staleness=2))
    for version in range(40):
        assert sum(group.version <= version for group in run.pool.started) == version * 4 + (1 + 2) * 4


def test_verl_has_at_most_sixteen_groups_an_engine_under_way() -> None:
    run = PeerRun(tail(batch_size=40, engines=2, slots=64), "verl")
    run.run(seconds=0.01)
    assert len(run.pool.started) == 32


# --- slime ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("publish", ["end", "start"])
def test_slime_has_one_job_ahead_and_no_group_of_two_versions(publish: str) -> None:
    run = ran("slime", tail(publish=publish))
    versions = [
        {segment.version for group in batch for segment in group.written[0].segments} for batch in run.pool.steps
    ]
    assert versions == [{max(step - 1, 0)} for step in range(40)]


def test_slime_loads_weights_every_interval() -> None:
    run = ran("slime", tail(max_staleness=3))
    assert [version for _, _, version in run.pool.replicas[0].engine.loads] == list(range(0, 40, 3))


def test_slime_throws_away_what_a_job_began_beyond_its_batch() -> None:
    run = ran("slime", redundant(tail(), groups=1.5))
    assert len(lost(run)) == 40 * 2
    assert max(ages(run)) <= 1


# --- ROLL -------------------------------------------------------------------------------------------------------------


def test_roll_throws_away_at_a_step_what_began_before_the_window_and_begins_others() -> None:
    run = PeerRun(tail(max_staleness=2), "roll-agentic")
    run.run(seconds=15.3)
    pool = run.pool
    assert {group.version < pool.version - 2 for group in lost(run)} == {True}
    assert {group.version < pool.version - 2 for group in (*pool.running, *pool.finished)} == {False}
    assert pool.step * 4 + len(pool.running) + len(pool.finished) == (2 + 1 + pool.version) * 4


def test_roll_trains_the_oldest_step_first_and_inside_it_the_first_done() -> None:
    run = PeerRun(tail(batch_size=2), "roll-agentic")
    first, second, third = began(run, 3)
    first.version, second.version, third.version = Version(1), Version(1), Version(0)
    for group in (second, first, third):
        run.rule.arrived(group)
    assert run.rule.batch() == [third, second]


# --- TRL --------------------------------------------------------------------------------------------------------------


def test_trl_always_has_the_bound_times_a_batch_under_way() -> None:
    run = ran("trl", tail(max_staleness=3))
    assert len(run.pool.running) == 12


def test_trl_drops_at_the_dequeue_and_nowhere_else() -> None:
    run = ran("trl", tail())
    assert all(group.written for group in lost(run))
    assert max(ages(run)) == 1


def test_trl_stops_at_a_full_queue() -> None:
    run = PeerRun(tail(train_s=1e6, lengths={"sigma": 0.0}), "trl")
    run.run(seconds=1e5)
    assert 1024 <= len(run.pool.finished) < 1024 + 4


# --- Laminar ----------------------------------------------------------------------------------------------------------


def test_laminar_writes_a_trajectory_with_one_version_wherever_it_goes() -> None:
    run = ran("laminar", tail(batch_size=16, engines=4, lengths={"mean_tokens": 400.0}, longest=4000))
    done = [group.written[0] for batch in run.pool.steps for group in batch]
    assert {len(sample.segments) for sample in done} == {1}
    assert [sample.written for sample in done] == [sample.length for sample in done]


def test_laminar_empties_an_engine_that_runs_dry_into_another_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[tuple[int, int]] = []
    move = Pool.move

    def watched(pool: Pool, group: Group, to: Replica) -> None:
        moves.append((group.version, to.version))
        move(pool, group, to)

    monkeypatch.setattr(Pool, "move", watched)
    of = tail(batch_size=16, engines=4, lengths={"mean_tokens": 400.0}, longest=4000)
    repacked = ran("laminar", of).rows[-1].ended_s
    assert moves
    assert all(version == there for version, there in moves)
    monkeypatch.setattr(laminar.Laminar, "_repack", _nothing)
    assert ran("laminar", of).rows[-1].ended_s > repacked


def _nothing(_: laminar.Laminar) -> None:
    pass
