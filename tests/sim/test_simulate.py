"""Whole runs in virtual time are reproducible and audited, and as fast as calculated where calculation is possible."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.schema import Coordination, Prompts, Redundancy
from staleflow.configs.simulation import Fleet, Occurrence
from staleflow.protocols.consistency.limits import Bound, OnOverdue
from staleflow.sim.asking import Stalled
from staleflow.sim.peers.compare import COLUMNS
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate
from staleflow.trace.audit.report import audit
from staleflow.trace.reader import read_events
from tests.sim.configs import config

ELASTIC = Path(__file__).parent.parent.parent / "configs" / "elastic.toml"
HASHES = """
from staleflow.sim.simulate import simulate
from tests.sim.configs import config
crash = [{"at_s": 3.0, "engine": 0, "what": "crash"}, {"at_s": 9.0, "engine": 0, "what": "return"}]
from staleflow.configs.simulation import Occurrence
print(simulate(config(events=[Occurrence(**event) for event in crash])).trace_hash)
"""


def fixed(tokens: int) -> dict[str, object]:
    """Length settings that give every trajectory ``tokens`` tokens."""
    return {"lengths": "uniform", "min_tokens": tokens, "max_tokens": tokens}


def ran(result: Result, steps: int = 12) -> Result:
    """Check that a run has finished all steps without a violation."""
    assert (len(result.steps), result.violations) == (steps, 0)
    return result


# --- reproducibility --------------------------------------------------------------------------------------------------


def test_a_run_is_the_same_whatever_the_hashes_of_strings_are() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", HASHES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(said) == 1


def test_a_run_whose_prompts_are_submitted_has_enough_of_them() -> None:
    ran(simulate(replace(config(), prompts=Prompts(submitted=True))))


def test_another_seed_is_another_run() -> None:
    assert len({simulate(config(seed=seed)).trace_hash for seed in range(3)}) == 3


# --- expected speeds --------------------------------------------------------------------------------------------------


def test_on_policy_every_step_takes_its_generation_and_its_training() -> None:
    result = ran(simulate(config(max_staleness=0, lengths=fixed(100))))
    assert [step.ended_s for step in result.steps] == pytest.approx([3.0 * (k + 1) for k in range(12)])
    assert (result.steps_per_min, result.trainer_limit) == pytest.approx((20.0, 30.0))
    assert result.trainer_idle == pytest.approx(1 / 3)
    assert (result.staleness_mean, result.staleness_max, result.length_bias) == (0.0, 0, 1.0)


def test_a_trainer_that_is_the_bottleneck_never_waits_but_for_the_first_batch() -> None:
    result = ran(simulate(config(max_staleness=1, lengths=fixed(100))))
    assert [step.began_s for step in result.steps] == pytest.approx([1.0 + 2.0 * k for k in range(12)])
    assert result.steps_per_min == pytest.approx(result.trainer_limit)


def test_engines_that_are_the_bottleneck_are_busy_all_the_time() -> None:
    result = ran(simulate(config(max_staleness=1, train_s=0.1, slots=4, engines=1, lengths=fixed(100))))
    # 4 groups of 2 samples, 4 slots: two rounds of one second each
    assert result.rollout_limit == pytest.approx(30.0)
    assert result.steps_per_min == pytest.approx(30.0, rel=0.01)
    assert result.engine_idle < 0.05


def test_reward_pull_and_load_take_their_time() -> None:
    result = ran(simulate(config(max_staleness=0, lengths=fixed(100), reward_s=0.5, pull_s=0.25, load_s=0.125)))
    assert result.steps_per_min == pytest.approx(60 / (0.375 + 1.0 + 0.5 + 2.0))


def test_published_at_the_start_of_a_step_a_version_gives_one_step_more() -> None:
    result = ran(simulate(config(max_staleness=0, lengths=fixed(100), publish="start")))
    # generation overlaps with the training, whose result it must not depend on
    assert result.steps_per_min == pytest.approx(30.0)


def test_engines_of_several_kinds_share_the_work_by_their_speed() -> None:
    fleet = [Fleet(count=1, speed=3.0, slots=4), Fleet(count=1, speed=1.0, slots=4)]
    result = ran(simulate(config(steps=30, max_staleness=2, train_s=0.1, lengths=fixed(100), fleet=fleet)), 30)
    fast, slow = result.engines
    assert 2.0 < fast.generated / slow.generated < 4.0
    assert result.rollout_limit == pytest.approx(120.0)


def test_engines_that_come_and_go_count_towards_the_limit_as_long_as_they_are_there() -> None:
    result = ran(simulate(config(train_s=0.1, slots=4, lengths=fixed(100), events=events((4.0, 1, "leave")))))
    first, last = result.steps[1].ended_s, result.steps[-3].ended_s  # the period that steps_per_min counts
    assert first < 4.0 < last
    assert result.rollout_limit == pytest.approx(30.0 * (1.0 + (4.0 - first) / (last - first)))
    assert result.steps_per_min < result.rollout_limit


def test_one_engine_that_becomes_eight_is_not_twice_as_fast_as_its_limit() -> None:
    result = simulate(load(ELASTIC), steps=60)
    assert len(result.engines) == 8
    assert 0.2 < result.steps_per_min / result.rollout_limit <= 1.0


def test_without_an_engine_in_the_steps_that_count_there_is_no_limit() -> None:
    crowd = config(
        steps=9, max_staleness=8, train_s=10.0, lengths=fixed(100), events=events((9.0, 0, "leave"), (9.0, 1, "leave"))
    )
    result = ran(simulate(crowd), 9)
    assert (result.rollout_limit, result.steps_per_min) == pytest.approx((0.0, 6.0))
    assert dict(COLUMNS)["÷\u00a0rollout limit"](result) == "-"


def test_turns_with_a_tool_in_between_take_longer_and_write_the_same() -> None:
    plain, turns = (ran(simulate(config(max_staleness=0, lengths=fixed(100), turns=n, tool_s=3.0))) for n in (1, 4))
    assert plain.trained == turns.trained == [100] * 96
    assert turns.steps_per_min < 0.5 * plain.steps_per_min


# --- both bounds, every policy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_overdue", OnOverdue)
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_trajectory_bound_holds_whatever_becomes_of_overdue_groups(
    on_overdue: OnOverdue, max_staleness: int
) -> None:
    result = ran(simulate(config(on_overdue=on_overdue, max_staleness=max_staleness, steps=20, train_s=0.3)), 20)
    assert result.staleness_max <= max_staleness
    assert result.masked == 0.0
    if on_overdue is OnOverdue.WAIT:
        assert (result.discarded, result.length_bias) == (0.0, 1.0)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("min_trainable", [0.0, 0.5])
def test_the_token_bound_masks_what_is_too_old(max_staleness: int, min_trainable: float) -> None:
    result = ran(
        simulate(
            config(bound=Bound.TOKEN, max_staleness=max_staleness, min_trainable=min_trainable, steps=20, train_s=0.3)
        ),
        20,
    )
    assert result.staleness_max <= max_staleness
    assert (result.masked > 0.0) == (max_staleness > 0)  # on policy, no tokens are written while a step trains
    assert (result.discarded > 0.0) == (min_trainable > 0.0 and max_staleness > 0)


def test_a_filter_costs_tokens_that_are_told_apart() -> None:
    result = ran(simulate(config(filter_share=0.5)))
    assert 0.2 < result.filtered < 0.7
    assert result.discarded == 0.0


# --- strategies with special demands on the simulated workers ---------------------------------------------------------


def test_groups_that_move_on_keep_their_tokens() -> None:
    fleet = [Fleet(count=2, slots=8), Fleet(count=2, slots=8, speed=0.2)]
    run = config(batch_size=8, train_s=1.0, longest=4000, lengths={"mean_tokens": 640.0}, fleet=fleet)
    still, moving = (
        ran(simulate(replace(run, coordination=Coordination(routing="cost_model", migration=migration))))
        for migration in ("none", "throughput")
    )
    assert moving.seconds < 0.7 * still.seconds
    assert (moving.discarded, moving.length_bias, len(moving.trained)) == (0.0, 1.0, 12 * 8 * 2)


def test_equal_engines_whose_caches_are_full_do_not_pass_groups_to_and_fro(tmp_path: Path) -> None:
    run = config(
        batch_size=16,
        group_size=8,
        max_staleness=2,
        slots=256,
        train_s=5.0,
        longest=4000,
        lengths={"mean_tokens": 900.0},
        kv_tokens=30_000,
        prompt_tokens=100,
        prefill_s=1e-4,
    )
    still, moving = (
        ran(simulate(replace(run, coordination=Coordination(migration=migration)), run_dir=tmp_path / migration))
        for migration in ("none", "throughput")
    )
    assert moving.seconds < 1.05 * still.seconds
    events = read_events(tmp_path / "throughput" / "trace.jsonl")
    leases = Counter(event["group"] for event in events if event["ev"] == "reserve")
    assert 1 < max(leases.values()) <= 4, "some move, and none for ever"


def test_redundant_samples_cut_the_tail_and_are_paid_for_with_tokens_and_bias() -> None:
    run = config(steps=30, train_s=0.3)
    spared = replace(run, rollout=replace(run.rollout, redundancy=Redundancy(samples=2.0)))
    plain, spared_result = ran(simulate(run), 30), ran(simulate(spared), 30)
    assert spared_result.seconds < plain.seconds
    assert spared_result.discarded > 0.3
    assert spared_result.length_bias < 0.8
    generated = sum(engine.generated for engine in spared_result.engines)
    assert sum(spared_result.trained) + spared_result.discarded * generated == pytest.approx(generated)


def test_known_lengths_let_clustering_work() -> None:
    run = config(steps=60, batch_size=8, train_s=0.3, longest=4000, lengths={"sigma": 1.5, "prompt_share": 1.0})
    clustered = replace(run, coordination=Coordination(composition="length_clustered", lookahead=10))
    known = replace(clustered, simulation=replace(run.simulation, known_lengths=True))
    assert ran(simulate(known), 60).steps_per_min > 1.2 * ran(simulate(run), 60).steps_per_min


def test_groups_are_spread_over_several_shards() -> None:
    run = config()
    ran(simulate(replace(run, trajectories=replace(run.trajectories, shards=3))))


# --- failing engines --------------------------------------------------------------------------------------------------


def events(*happen: tuple[float, int, str]) -> list[Occurrence]:
    return [Occurrence(at_s=at_s, engine=engine, what=what) for at_s, engine, what in happen]  # type: ignore[arg-type]


def test_a_crash_costs_the_groups_of_that_engine_and_their_lease_time() -> None:
    result = ran(simulate(config(steps=20, train_s=0.1, events=events((5.0, 0, "crash"), (12.0, 0, "return")))), 20)
    assert [engine.name for engine in result.engines] == ["rollout-0.0", "rollout-1.1", "rollout-0.2"]
    assert (result.engines[0].ended_s, result.engines[2].began_s) == (5.0, 12.0)
    assert 0.0 < result.discarded < 0.2


def test_an_engine_that_leaves_gives_its_groups_back_at_once() -> None:
    result = ran(simulate(config(steps=20, train_s=0.1, events=events((5.0, 0, "leave")))), 20)
    assert result.engines[0].ended_s == 5.0
    assert 0.0 < result.discarded < 0.2


def test_an_engine_that_hangs_loses_its_leases_and_its_late_push_is_thrown_away() -> None:
    result = ran(simulate(config(steps=30, train_s=0.1, events=events((5.0, 0, "hang"), (20.0, 0, "return")))), 30)
    assert result.discarded > 0.0
    assert len(result.engines) == 2


def test_an_engine_may_join_in_the_middle() -> None:
    result = ran(simulate(config(steps=20, train_s=0.1, slots=4, events=events((10.0, 2, "join")))), 20)
    assert [engine.began_s for engine in result.engines] == [0.0, 0.0, 10.0]
    assert result.engines[2].generated > 0


def test_a_run_whose_engines_are_all_gone_says_so_instead_of_going_on_for_ever() -> None:
    with pytest.raises(Stalled, match="no rollout worker is attached"):
        simulate(config(events=events((5.0, 0, "crash"), (6.0, 1, "leave"))))


def test_a_run_none_of_whose_groups_fits_anywhere_says_so() -> None:
    with pytest.raises(Stalled, match="a sample of 100 tokens does not fit into a KV cache of 50"):
        simulate(config(kv_tokens=50, lengths=fixed(100)))


def test_a_full_cache_slows_a_run_down_and_breaks_nothing() -> None:
    wide, narrow = (ran(simulate(config(train_s=0.1, kv_tokens=kv))) for kv in (0, 400))
    assert narrow.seconds > wide.seconds
    assert sum(engine.preempted for engine in narrow.engines) > 0


# --- output files and rejected configurations -------------------------------------------------------------------------


def test_the_trace_is_kept_where_it_is_wanted(tmp_path: Path) -> None:
    result = ran(simulate(config(), run_dir=tmp_path / "kept"))
    report = audit(tmp_path / "kept" / "trace.jsonl")
    assert (report.num_violations, report.steps, report.closed) == (0, 12, True)
    assert len((tmp_path / "kept" / "metrics.jsonl").read_text().splitlines()) == 12
    with pytest.raises(ConfigError, match=r"it has a trace\.jsonl already"):
        simulate(config(), run_dir=tmp_path / "kept")
    assert result.trace_hash in (tmp_path / "kept" / "trace.jsonl").read_text()


def test_a_run_ends_after_so_many_steps_or_seconds() -> None:
    assert len(simulate(config(), steps=3).steps) == 3
    result = simulate(config(lengths=fixed(100)), seconds=10.0)
    assert (len(result.steps), result.violations) == (4, 0)


def test_what_is_still_under_way_at_the_end_is_no_length_bias() -> None:
    result = simulate(config(steps=200, train_s=0.3, max_staleness=2), seconds=30.0)
    assert 10 < len(result.steps) < 200
    assert result.length_bias == 1.0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lengths": {"k2": 0.0}}, "a step of an engine of speed 1 would last 0 s: above 0"),
        ({"lengths": {"k1": 1e9}}, "would last 6.4e+12 s"),
        ({"lengths": {"k1": float("inf")}}, "would last nan s"),
        ({"lengths": {"k4": float("nan")}}, "would last nan s"),
        ({"fleet": [Fleet(count=2, slots=1)]}, "simulation.fleet.slots is 1; engine 0 must hold the 2 samples"),
        ({"prompt_tokens": 100, "kv_tokens": 100}, "simulation.kv_tokens is 100; no engine could hold a prompt"),
        ({"events": events((1.0, 7, "crash"))}, "simulation.events.engine is 7; engines are 0 to 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        simulate(config(**wrong))  # type: ignore[arg-type]
    assert says in str(refused.value)
