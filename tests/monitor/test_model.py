"""A status becomes the texts that a person reads; the tests need no terminal."""

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from staleflow.configs.loading.load import load
from staleflow.launch import ray_machines, ssh
from staleflow.launch.ray_machines import fleet
from staleflow.monitor.history import History
from staleflow.monitor.model import board
from staleflow.monitor.plain import line
from staleflow.monitor.roles import RoleRow, role_of, roles
from staleflow.monitor.rows import AgeRow, EventRow, PinRow, VersionRow, WindowRow
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import ParametersStatus, StageFailing
from staleflow.protocols.wire.messages.status import (
    Ages,
    Hold,
    Pinned,
    RelayPlace,
    ShardStatus,
    WindowStatus,
    WorkerStatus,
)
from staleflow.supervisor.children import Child
from staleflow.supervisor.lifeline import Lifeline
from staleflow.supervisor.roles import workers
from staleflow.supervisor.view import Snapshot
from tests.monitor.world import STATUS, process, shown, stored

CLUSTER = Path(__file__).parents[2] / "configs" / "cluster.toml"


def doing(name: str, **status: Any) -> str:
    return board("run", shown((process(name),), **status), History()).roles[0].doing


def test_the_numbers_come_from_the_status() -> None:
    history = History()
    history.see(shown())
    it = board("run", shown(), history)
    assert (it.step, it.steps, it.reward, it.rewards) == (23, 100, 0.61, (0.61,))
    assert (it.staleness_mean, it.staleness_max, it.bound, it.violations) == (1.25, 2, 2, 0)
    assert (it.trained_per_s, it.generated_per_s, it.loss, it.waits) == (980.0, 1544.0, 0.123, False)
    assert it.groups[:2] == (("leased", 5), ("pushed", 3))
    assert it.why == STATUS.why


def test_the_window_tells_sealed_batches_what_is_live_by_each_step_and_who_pins() -> None:
    assert board("run", shown(), History()).window == (
        WindowRow(deadline=23, occupied=8, sealed="trains"),
        WindowRow(deadline=24, leased=1, pushed=1, occupied=4, pinning=2, total=6, room=8),
        WindowRow(deadline=25, leased=4, pushed=2, occupied=4, pinning=0, total=16, room=16),
    )
    ahead = board("run", shown(next_step=25, window=()), History()).window
    assert [(row.deadline, row.sealed) for row in ahead] == [(23, "trains"), (24, "sealed")]


def test_a_mirror_that_is_behind_is_shown_with_the_reason() -> None:
    behind = ParametersStatus(mirror="s3://b/x: AccessDenied")
    seen = dataclasses.replace(shown((process("parameters"),)), parameters=behind)
    (row,) = (row for row in roles(seen) if row.name == "parameters")
    assert row.doing.endswith("; the mirror is behind: s3://b/x: AccessDenied")


def test_a_relay_says_how_many_get_their_weights_there_where_that_is_known() -> None:
    assert doing("relay-0") == "serves weights"

    def tree(*relays: tuple[str, int]) -> ParametersStatus:
        places = (RelayPlace(relay=relay, endpoint="", parent="", num_below=below) for relay, below in relays)
        return ParametersStatus(relays=tuple(places))

    both = tree(("relay-0.12ab34cd", 2), ("relay-1.12ab34ce", 1))
    known = dataclasses.replace(shown((process("relay-0"), process("relay-1"))), parameters=both)
    rows = board("run", known, History()).roles[:2]
    assert [row.doing for row in rows] == ["serves weights to 2 readers", "serves weights to 1 reader"]
    plain = dataclasses.replace(known, parameters=tree(("relay-1", 1)))
    assert board("run", plain, History()).roles[1].doing == "serves weights to 1 reader"


def test_under_the_token_bound_the_window_is_one_volume() -> None:
    row = WindowStatus(deadline=0, leased=5, pushed=1, occupied=2)
    it = board("run", shown(bound="token", window=(row,), pinned=Pinned(step=24)), History())
    assert it.window[-1] == WindowRow(deadline=25, leased=5, pushed=1, occupied=2, total=8, room=16)


def test_every_age_up_to_the_bound_has_a_row_and_older_ones_where_there_are_any() -> None:
    it = board("run", shown(), History())
    assert it.ages == (
        AgeRow(age=0, in_flight=4, in_queue=6, consumed=8),
        AgeRow(age=1, in_flight=1, in_queue=5, consumed=150),
        AgeRow(age=2, in_flight=0, in_queue=0, consumed=26),
    )
    older = board("run", shown(staleness=Ages(consumed=((4, 1),))), History())
    assert [row.age for row in older.ages] == [0, 1, 2, 3, 4]


def test_pins_versions_and_events_are_told_with_names_and_times() -> None:
    it = board("run", shown(), History())
    assert it.pins == (
        PinRow(group=117, step=24, version=22, where="rollout-1", so_far_s=31.0, left_s=20.0),
        PinRow(group=119, step=24, version=22, where="stage reward", so_far_s=1.5, left_s=None),
    )
    assert it.versions == (
        VersionRow(version=23, lineage=0, nbytes=2_200_000, engines=1, pinned_by=()),
        VersionRow(version=22, lineage=0, nbytes=2_200_000, engines=1, pinned_by=("rollout-1",)),
    )
    assert it.events == (
        EventRow(ago_s=2.0, words="version 23 published, 2.2 MB", tone="good"),
        EventRow(ago_s=12.0, words="group 98 released: expired", tone="warn"),
        EventRow(ago_s=90.0, words="rollout-0 attached", tone=""),
    )


def test_a_stage_worker_that_fails_everything_and_stages_and_environments_that_are_the_limit_are_events() -> None:
    worker = WorkerId("judge-0.ab")
    failing = StageFailing(worker=worker, failures=12, failing_ms=5_000, held_ms=900, why="judge: refused")
    limit = "stage judge: 8 of 8 calls under way, 4 groups queued; raise stage[0].concurrency or stage[0].workers"
    stage = structs.replace(STATUS.stages[0], calls_under_way=8, limit=limit, failing=(failing,))
    episodes = "environment at rollout-0: 8 of 8 episodes under way, 5 queued; raise environment.concurrency"
    instance = structs.replace(STATUS.instances[0], limit=episodes)
    it = board("run", shown(stages=(stage,), instances=(instance,)), History())
    failed, full, environment = it.events[:3]
    assert (failed.ago_s, failed.tone) == (5.0, "bad")
    assert failed.words == "judge-0 fails every group of the stage judge, 12 in a row, and is held: judge: refused"
    assert (full.words, full.tone) == (limit, "warn")
    assert (environment.words, environment.tone) == (episodes, "warn")
    assert [(row.under_way, row.calls, row.full, row.failing) for row in it.stages] == [(8, 8, True, 1)]


def test_an_engine_that_fails_everything_is_an_event_and_its_row_says_what_holds_it() -> None:
    first, second = STATUS.instances[:2]
    held = structs.replace(first, failed=Hold(groups=9, held_s=4.2, detail="no module named judge"))
    on_trial = structs.replace(second, failed=Hold(groups=12, held_s=0.0, detail="no module named judge"))
    it = board("run", shown(instances=(held, on_trial)), History())
    assert [row.command for row in it.instances] == ["held 4 s: 9 failed", "on trial: 12 failed"]
    assert [(row.ago_s, row.tone) for row in it.events[:2]] == [(None, "bad")] * 2
    assert [row.words for row in it.events[:2]] == [
        "rollout-0 is on hold for 4 s: its last 9 groups failed: no module named judge",
        "rollout-1 is limited to one group at a time: its last 12 groups failed: no module named judge",
    ]


def test_a_damaged_version_says_so_and_one_that_only_engines_have_is_shown() -> None:
    kept = ParametersStatus(versions=(stored(23, nbytes=5, corrupt="w"),))
    it = board("run", dataclasses.replace(shown(), parameters=kept), History())
    assert [(row.version, row.nbytes, row.note) for row in it.versions] == [(23, 5, "damaged"), (22, None, "")]


def test_limits_say_how_much_of_each_is_used() -> None:
    history = History()
    for at_s, waits in ((0.0, ""), (30.0, "engines"), (40.0, "")):
        history.see(shown(at_s=at_s, trainer_waits=waits))
    it = board("run", shown(at_s=40.0), history)
    assert {limit.name: (limit.used, limit.full) for limit in it.limits} == {
        "engines": (36, 96),
        "window": (16, 16),
        "trainer": (pytest.approx(0.75 * 3.0 / 3.2), 1.0),
        "tokens": (40_000, 50_000),
    }


def test_the_trainers_last_minute_is_shared_out_by_what_it_did() -> None:
    history = History()
    for at_s, waits in ((0.0, "workers"), (40.0, ""), (80.0, "older groups"), (100.0, "engines"), (110.0, "")):
        history.see(shown(at_s=at_s, trainer_waits=waits))
    doing, shares = zip(*history.trainer_time(), strict=True)
    assert doing == ("trains", "older groups", "engines", "publish")
    assert shares == pytest.approx((1 / 2 * 3.0 / 3.2, 1 / 3, 1 / 6, 1 / 2 * 0.2 / 3.2))


def test_the_trainers_time_with_a_batch_is_divided_as_in_its_last_steps() -> None:
    history, step = History(), {"time/wait_for_batch": 1.0, "time/train": 3.0, "time/publish": 0.5}
    for at_s in (0.0, 60.0):
        history.see(dataclasses.replace(shown(at_s=at_s), status=structs.replace(STATUS, metrics={})))
    history.line({"step": 5, "time/step": 4.5, **step, "time/checkpoint": 0.0, "time/eval": 0.0})
    history.line({"step": 6, "time/step": 7.5, **step, "time/checkpoint": 1.0, "time/eval": 2.0})
    assert dict(history.trainer_time()) == pytest.approx(
        {"trains": 0.6, "publish": 0.1, "checkpoint": 0.1, "eval": 0.2}
    )
    assert dict(history.step_times)["time/eval"] == 2.0
    history.line({"step": 7, "time/step": 4.5, **step, "time/checkpoint": 0.0, "time/eval": 0.0})
    assert [key for key, _ in history.step_times] == ["time/step", *step]


def test_one_look_knows_the_trainers_last_step_only() -> None:
    history = History()
    history.see(shown())
    doing, shares = zip(*history.trainer_time(), strict=True)
    assert doing == ("trains", "its batch", "publish")
    assert shares == pytest.approx((3.0 / 4.2, 1.0 / 4.2, 0.2 / 4.2))


def test_an_engine_keeps_its_curve_and_one_that_left_has_none() -> None:
    history = History()
    for at_s in range(3):
        history.see(shown(at_s=float(at_s)))
    history.see(shown(at_s=3.0, instances=STATUS.instances[:1]))
    assert {worker: list(rates) for worker, rates in history.sparks.items()} == {"rollout-0.aa": [1234.0] * 4}


def test_before_the_first_status_nothing_is_claimed() -> None:
    it = board("run", Snapshot(phase="building the model", elapsed_s=1.0, detail="step 3"), History())
    assert (it.steps, it.reward, it.staleness_max, it.bound, it.left_s) == (0, None, None, None, None)
    assert (it.roles, it.why) == ((), "")


def test_the_builder_of_the_model_says_how_far_it_is() -> None:
    building = Snapshot(phase="building the model", elapsed_s=1.0, processes=(process("model"),), detail="step 3")
    assert board("run", building, History()).roles == (RoleRow(name="model", doing="step 3"),)


def test_a_worker_that_loads_says_how_far_it_is_on_the_screen_and_in_a_line() -> None:
    loads = dataclasses.replace(process("trainer"), doing="Loading weights, 34 %, 17 of 50")
    it = board("run", shown((process("rollout-7"), loads), trainer_term=0, why="no trainer has joined"), History())
    assert [role.doing for role in it.roles[:2]] == ["loading", "loading: Loading weights, 34 %, 17 of 50"]
    assert line(it).endswith("(no trainer has joined; trainer loading: Loading weights, 34 %, 17 of 50)")
    assert doing("trainer") != "loading", "and nothing of it once it has begun"


def test_the_first_and_the_last_evaluation_are_shown() -> None:
    history = History()
    history.see(shown(metrics={"step": 23, "reward/eval": 0.25}))
    history.see(shown(metrics={"step": 40, "reward/eval": 0.75}))
    it = board("run", shown(), history)
    assert it.held_out == (0.25, 0.75)


def test_steps_between_two_looks_are_seen_too() -> None:
    between: list[dict[str, Any]] = [
        {"step": 23, "reward/mean": 0.5, "off_policy/mean": 2.5, "off_policy/max": 3, "reward/eval": 0.75},
        {"step": 24, "reward/mean": 0.7, "off_policy/mean": 1.0, "off_policy/max": 1},
    ]
    history = History()
    history.see(shown(metrics={"step": 22, "reward/eval": 0.25}))
    history.see(dataclasses.replace(shown(metrics=between[1]), lines=tuple(between)))
    it = board("run", shown(metrics=between[1]), history)
    assert it.held_out == (0.25, 0.75)
    assert (it.rewards, it.staleness_max) == ((0.5, 0.7), 3)


def test_an_evaluation_changes_no_other_number() -> None:
    history = History()
    history.see(shown())
    history.see(shown(metrics={"step": 23, "reward/eval": 0.25}))
    it = board("run", shown(), history)
    assert (it.reward, it.staleness_max) == (0.61, 2)


def test_the_largest_staleness_seen_is_kept() -> None:
    history = History()
    history.see(shown())
    history.see(shown(metrics={"step": 23, "off_policy/mean": 0.0, "off_policy/max": 0}))
    assert (history.staleness_mean, history.staleness_max) == (0.0, 2)


def test_the_time_left_follows_the_pace_of_the_last_steps() -> None:
    history = History()
    assert history.left_s(100) is None
    history.steps = [(0.0, 0), (10.0, 1), (12.0, 2), (14.0, 3)]
    assert history.left_s(10, window=2) == 14.0


def test_each_role_says_what_it_does() -> None:
    assert doing("rollout-0") == "version 23, 32 decoding, 5 queued, 1,234 tokens/s"
    assert doing("rollout-2", workers=(WorkerStatus(name="rollout-2", role="rollout"),)) == "waits for weights"
    assert doing("rollout-7") == "loading"
    assert doing("rollout-0", workers=(), finished=True) == "done"
    assert doing("reward-0") == "judging, 3 groups to go"
    assert doing("judge-0") == "judging, 5 groups to go"
    assert doing("reward-0", stages=()) == "waits for groups"
    assert doing("scheduler") == "5 leases out, 3 engines"
    assert doing("trajectories-0") == "stores 19 groups to train"
    shards = (ShardStatus(shard=0, used_share=0.42), ShardStatus(shard=1))
    assert doing("trajectories-0", shards=shards[:1]) == "stores 19 groups to train, 42 % full"
    assert doing("trajectories-0", shards=shards) == "stores its part of the groups, 42 % full"
    assert doing("trajectories-1", shards=shards) == "stores its part of the groups"
    full = "full: pushes wait until a checkpoint frees space; stores 19 groups to train"
    assert doing("trajectories-0", shards=(ShardStatus(shard=0, used_share=0.9),)) == full
    assert doing("trajectories-0", shards=(ShardStatus(shard=0, used_share=0.7, full="map"),)) == full
    disk = "its disk is full: pushes wait; stores 19 groups to train"
    assert doing("trajectories-0", shards=(ShardStatus(shard=0, used_share=0.1, full="disk"),)) == disk
    assert doing("parameters") == "serves version 23"
    assert doing("parameters", version=-1) == "waits for version 0"


def test_what_looks_after_a_machine_is_running_and_loads_nothing(tmp_path: Path) -> None:
    """Under ``staleflow launch`` the processes on a machine attach themselves and are reported separately."""
    config = load(CLUSTER, ['launch.hosts=["trainer-1", "engines-1", "engines-2"]'])
    ours = [*ssh.machines(config, config.launch, tmp_path, "tcp://head:1"), ray_machines.machines(fleet(config))]
    with closing(Lifeline()) as lifeline:
        children = [Child(role, tmp_path, lifeline) for role in (*ours, *workers(config, tmp_path)[:1])]
        states = [dataclasses.replace(child.state(), state="running") for child in children]
    told = board("run", shown(tuple(states), workers=()), History()).roles
    assert [(row.name, row.doing) for row in told] == [
        ("trainer-machine-0", "running"),
        ("rollout-machine-0", "running"),
        ("rollout-machine-1", "running"),
        ("ray", "running"),
        ("rollout-0", "loading"),
    ]


def test_the_trainer_says_which_step_it_trains_or_waits_for() -> None:
    assert doing("trainer") == "trains step 23"
    assert doing("trainer", ledger={"sealed": 0}) == "waits for the batch of step 23"
    assert doing("trainer", trainer_term=0) == "loading"
    assert doing("trainer", version=-1) == "publishing version 0"
    assert doing("trainer", version=100) == "judging held-out prompts"
    assert doing("trainer", finished=True) == "done"


def test_a_process_that_is_not_running_is_bad_news_unless_the_run_ends() -> None:
    snapshot = shown((process("rollout-0", "waiting to restart", 2), process("trainer", "ended")))
    assert board("run", snapshot, History()).roles[:2] == (
        RoleRow(name="rollout-0", doing="waiting to restart", good=False, restarts=2),
        RoleRow(name="trainer", doing="ended", good=False),
    )
    ending = Snapshot(phase="draining", elapsed_s=1.0, processes=(process("trainer", "ended"),), status=STATUS)
    assert board("run", ending, History()).roles[0].good


def test_workers_attached_by_hand_are_shown_and_silence_is_said() -> None:
    workers = (
        WorkerStatus(name="rollout-0", role="rollout", last_seen_s=0.1),
        WorkerStatus(name="reward-9f", role="stage", last_seen_s=0.1),
        WorkerStatus(name="rollout-9f", role="rollout", last_seen_s=7.4),
        WorkerStatus(name="admin.1", role="admin", last_seen_s=0.0),
    )
    rows = board("run", shown((process("rollout-0"),), workers=workers), History()).roles
    assert [row.name for row in rows] == ["rollout-0", "reward-9f", "rollout-9f"]
    assert rows[1].doing == "judging, 3 groups to go"
    assert rows[2] == RoleRow(name="rollout-9f", doing="silent for 7 s", good=False)


def test_a_silent_scheduler_is_the_reason_for_everything() -> None:
    assert board("run", shown(age_s=4.0), History()).why == "the scheduler has not answered for 4 s"
    assert board("run", shown(error="the third bad step"), History()).why == "the third bad step"


def test_the_name_of_a_role_comes_from_the_name_of_its_process() -> None:
    assert [role_of(name) for name in ("rollout-3", "reward-0", "judge-1", "trainer", "trajectories-1")] == [
        "rollout",
        "stage",
        "stage",
        "trainer",
        "trajectories",
    ]
