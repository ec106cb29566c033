"""A run at one moment, for tests of displays: step 24 is pinned by two groups, and one engine is silent."""

from typing import Any

from msgspec import structs

from staleflow.protocols.wire.messages import ParametersStatus, SchedulerStatus
from staleflow.protocols.wire.messages.status import (
    Ages,
    InstanceStatus,
    Pin,
    Pinned,
    PublishedVersion,
    RunTotals,
    StageStatus,
    WindowStatus,
    WorkerStatus,
)
from staleflow.supervisor.view import ProcessState, Snapshot

NOW_S = 1_800_000_000.0
ROLES = ("scheduler", "trajectories-0", "parameters", "rollout-0", "rollout-1", "rollout-2", "reward-0", "trainer")
STATUS = SchedulerStatus(
    run="quickstart-1",
    incarnation=1,
    version=23,
    next_step=24,
    steps=100,
    trainer_term=1,
    max_staleness=2,
    bound="trajectory",
    on_overdue="wait",
    batch_size=8,
    group_size=4,
    max_inflight=32,
    ledger={"leased": 5, "pushed": 3, "occupied": 8, "sealed": 8, "consumed": 184, "spares": 0, "claimed": 0},
    window=(
        WindowStatus(deadline=24, leased=1, pushed=1, occupied=4),
        WindowStatus(deadline=25, leased=4, pushed=2, occupied=4),
    ),
    staleness=Ages(in_flight=((0, 4), (1, 1)), in_queue=((0, 6), (1, 5)), consumed=((0, 8), (1, 150), (2, 26))),
    pinned=Pinned(
        step=24,
        groups=(
            Pin(group=117, version=22, worker="rollout-1", so_far_s=31.0, left_s=20.0),
            Pin(group=119, version=22, worker="", stages=("reward",), so_far_s=1.5),
        ),
    ),
    why="the trainer works on step 23; step 24 waits for 2 groups of version 22 (117 and 119), on rollout-1 and in "
    "the stage reward, about 20 s left; policy: wait",
    instances=(
        InstanceStatus(
            worker="rollout-0.aa", name="rollout-0", version=23, running=32, waiting=5, slots=32, kv_used=0.75,
            tokens_per_s=1234.0, held=8, last_command="assign 131", last_seen_s=0.1,
        ),
        InstanceStatus(
            worker="rollout-1.aa", name="rollout-1", version=22, loading=23, running=4, slots=32, kv_used=0.25,
            tokens_per_s=310.0, held=1, last_command="pull v23", last_seen_s=0.1,
        ),
        InstanceStatus(worker="rollout-2.aa", name="rollout-2", slots=32, kv_used=0.0, last_seen_s=7.4),
    ),
    workers=(
        WorkerStatus(name="rollout-0", role="rollout", last_seen_s=0.1),
        WorkerStatus(name="rollout-1", role="rollout", last_seen_s=0.1),
        WorkerStatus(name="reward-0", role="stage", last_seen_s=0.1),
        WorkerStatus(name="judge-0", role="stage", last_seen_s=0.1),
    ),
    stages=(
        StageStatus(stage="judge", workers=1, waiting=4, taken=1, calls=8, calls_under_way=1),
        StageStatus(stage="reward", after=("judge",), workers=2, waiting=2, taken=1),
    ),
    recent=(
        {"t": (NOW_S - 90) * 1e9, "ev": "attach", "worker": "rollout-0.aa", "role": "rollout", "why": ""},
        {"t": (NOW_S - 12) * 1e9, "ev": "release", "group": 98, "lease": 41, "tokens": 0, "why": "expired"},
        {"t": (NOW_S - 2) * 1e9, "ev": "publish", "lineage": 0, "version": 23, "sha": "ab", "bytes": 2_200_000},
    ),
    totals=RunTotals(tokens_generated=50_000, tokens_trained=40_000),
    metrics={
        "step": 22, "reward/mean": 0.61, "loss": 0.123, "off_policy/mean": 1.25, "off_policy/max": 2,
        "perf/tokens_per_second": 980.0, "time/step": 4.2, "time/wait_for_batch": 1.0, "time/train": 3.0,
        "time/publish": 0.2,
    },
)  # fmt: skip


def stored(
    version: int, nbytes: int = 2_200_000, corrupt: str = "", pinned_by: tuple[str, ...] = ()
) -> PublishedVersion:
    return PublishedVersion(
        lineage=0, version=version, sha="ab", nbytes=nbytes, pinned_by=pinned_by, registered=True, corrupt=corrupt
    )


PARAMETERS = ParametersStatus(versions=(stored(22, pinned_by=("rollout-1.aa",)), stored(23)))


def shown(processes: tuple[ProcessState, ...] = (), age_s: float = 0.0, at_s: float = 60.0, **status: Any) -> Snapshot:
    """That run, with some values replaced."""
    return Snapshot(
        phase="training",
        elapsed_s=at_s,
        processes=processes,
        status=structs.replace(STATUS, **status),
        status_age_s=age_s,
        parameters=PARAMETERS,
        unix_s=NOW_S,
    )


def process(name: str, state: str = "running", restarts: int = 0) -> ProcessState:
    return ProcessState(name=name, kind="worker", state=state, restarts=restarts)
