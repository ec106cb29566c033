"""From a status to what a person reads; no terminal."""

import dataclasses
from typing import Any

from staleflow.monitor.model import History, RoleRow, WindowRow, board, role_of
from staleflow.supervisor.view import ProcessState, Snapshot

STATUS: dict[str, Any] = {
    "version": 23,
    "next_step": 24,
    "steps": 100,
    "trainer_term": 1,
    "max_staleness": 2,
    "bound": "trajectory",
    "batch_size": 8,
    "ledger": {"leased": 8, "pushed": 3, "occupied": 12, "sealed": 8, "consumed": 184, "spares": 0},
    "window": [{"deadline": 24, "leased": 1, "pushed": 0, "occupied": 7}],
    "why": "the trainer works on step 23",
    "instances": [
        {"name": "rollout-0", "version": 23, "running": 32, "waiting": 5, "tokens_per_s": 1234.0},
        {"name": "rollout-1", "version": -1, "running": 0, "waiting": 0, "tokens_per_s": 0.0},
    ],
    "workers": [
        {"name": "rollout-0", "role": "rollout", "last_seen_s": 0.1},
        {"name": "rollout-1", "role": "rollout", "last_seen_s": 0.1},
        {"name": "reward-0", "role": "stage", "last_seen_s": 0.1},
        {"name": "judge-0", "role": "stage", "last_seen_s": 0.1},
    ],
    "stages": [
        {"stage": "judge", "after": [], "workers": 1, "waiting": 4, "taken": 1},
        {"stage": "reward", "after": ["judge"], "workers": 2, "waiting": 2, "taken": 1},
    ],
    "violations": 0,
    "metrics": {"step": 22, "reward/mean": 0.61, "off_policy/mean": 1.25, "off_policy/max": 2},
}


def shown(processes: tuple[ProcessState, ...] = (), age_s: float = 0.0, **status: Any) -> Snapshot:
    return Snapshot(phase="training", elapsed_s=60.0, processes=processes, status=STATUS | status, status_age_s=age_s)


def process(name: str, state: str = "running", restarts: int = 0) -> ProcessState:
    return ProcessState(name=name, kind="worker", state=state, restarts=restarts)


def doing(name: str, **status: Any) -> str:
    return board("run", shown((process(name),), **status), History()).roles[0].doing


def test_the_numbers_come_from_the_status() -> None:
    history = History()
    history.see(shown())
    it = board("run", shown(), history)
    assert (it.step, it.steps, it.reward, it.rewards) == (23, 100, 0.61, (0.61,))
    assert (it.staleness_mean, it.staleness_max, it.bound, it.violations) == (1.25, 2, 2, 0)
    assert it.generated_per_s == 1234.0
    assert it.groups[:2] == (("leased", 8), ("pushed", 3))
    assert it.window == (WindowRow(deadline=24, leased=1, pushed=0, occupied=7),)
    assert it.why == "the trainer works on step 23"


def test_before_the_first_status_nothing_is_claimed() -> None:
    it = board("run", Snapshot(phase="building the model", elapsed_s=1.0, detail="step 3"), History())
    assert (it.steps, it.reward, it.staleness_max, it.bound, it.left_s) == (0, None, None, None, None)
    assert (it.roles, it.why) == ((), "")


def test_the_builder_of_the_model_says_how_far_it_is() -> None:
    building = Snapshot(phase="building the model", elapsed_s=1.0, processes=(process("model"),), detail="step 3")
    assert board("run", building, History()).roles == (RoleRow(name="model", doing="step 3"),)


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
    assert doing("rollout-1") == "waits for weights"
    assert doing("rollout-7") == "loading"
    assert doing("rollout-0", workers=[], finished=True) == "done"
    assert doing("reward-0") == "judging, 3 groups to go"
    assert doing("judge-0") == "judging, 5 groups to go"
    assert doing("reward-0", stages=[]) == "waits for groups"
    assert doing("scheduler") == "8 leases out, 2 engines"
    assert doing("trajectories-0") == "keeps 23 groups to train"
    assert doing("parameters") == "serves version 23"
    assert doing("parameters", version=-1) == "waits for version 0"


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
    workers = [
        {"name": "rollout-0", "role": "rollout", "last_seen_s": 0.1},
        {"name": "reward-9f", "role": "stage", "last_seen_s": 0.1},
        {"name": "rollout-9f", "role": "rollout", "last_seen_s": 7.4},
        {"name": "admin.1", "role": "admin", "last_seen_s": 0.0},
    ]
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
