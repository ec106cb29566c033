"""A configuration determines the processes of its run."""

from pathlib import Path

from staleflow.configs.loading.load import load
from staleflow.supervisor.roles import Kind, WorkingSince, servers, workers

SIMULATED = Path(__file__).parent.parent.parent / "configs" / "simulated.toml"


def test_every_role_is_a_process_of_its_own() -> None:
    config = load(SIMULATED, ["trajectories.shards=2", "rollout.workers=3", "reward.workers=2", "trainer.threads=4"])
    assert [role.name for role in servers(config, Path("r"))] == [
        "scheduler",
        "trajectories-0",
        "trajectories-1",
        "parameters",
    ]
    attached = workers(config, Path("r"))
    assert [role.name for role in attached] == [
        "rollout-0",
        "rollout-1",
        "rollout-2",
        "reward-0",
        "reward-1",
        "trainer",
    ]
    assert (attached[-1].kind, attached[-1].threads) == (Kind.TRAINER, 4)


def test_stages_beyond_the_reward_are_there_when_the_algorithm_needs_them() -> None:
    overrides = ["model.path=/m", "reference.workers=2", "reference.threads=3", "trainer.algorithm.kl_coef=0.1"]
    attached = workers(load(SIMULATED, [*overrides, "trainer.algorithm.advantage=gae"]), Path("/r"))
    names = ["rollout-0", "rollout-1", "reward-0", "reference-0", "reference-1", "critic-0", "trainer"]
    assert [role.name for role in attached] == names
    reference = attached[3]
    assert reference.command[3:] == (
        *("attach", "stage", "--run-dir", "/r", "--name", "reference-0", "--stage", "reference"),
    )
    assert (reference.kind, reference.threads) == (Kind.WORKER, 3)
    without = workers(load(SIMULATED), Path("/r"))
    assert not any(role.name.startswith(("reference", "critic")) for role in without)


def test_gpus_are_shared_out_over_the_workers_and_the_trainer_has_its_own() -> None:
    overrides = ["rollout.workers=3", "rollout.gpus=[4,5]", "trainer.gpus=[0,1]"]
    attached = {role.name: role.gpus for role in workers(load(SIMULATED, overrides), Path("/r"))}
    assert [attached[f"rollout-{number}"] for number in range(3)] == [(4,), (5,), (4,)]
    assert (attached["trainer"], attached["reward-0"]) == ((0, 1), ())


def test_an_engine_of_several_gpus_gets_them_all() -> None:
    overrides = ["rollout.engine=vllm", "model.path=/m", "rollout.workers=2", "rollout.vllm.tensor_parallel=2"]
    attached = workers(load(SIMULATED, [*overrides, "rollout.gpus=[0,1,2,3]"]), Path("/r"))
    assert [role.gpus for role in attached[:2]] == [(0, 1), (2, 3)]


def test_a_worker_of_a_pool_is_started_with_the_settings_of_its_pool() -> None:
    pool = "rollout.pool=[{threads=2}, {workers=2, max_inflight=99, simulated={k2=0.5}}]"
    first, second, third, *_ = workers(load(SIMULATED, ["rollout.workers=1", pool]), Path("/r"))
    assert (first.threads, second.threads, third.name) == (2, 1, "rollout-2")
    assert first.command[3:] == (*("attach", "rollout", "--run-dir", "/r", "--name", "rollout-0", "rollout.threads=2"),)
    assert second.command[-2:] == ("rollout.max_inflight=99", "rollout.simulated.k2=0.5")


def test_a_role_is_started_as_a_person_would_start_it() -> None:
    config = load(SIMULATED)
    shard = servers(config, Path("/r"))[1]
    assert shard.command[1:] == ("-m", "staleflow.cli", "serve", "trajectories", "--shard", "0", "--run-dir", "/r")
    rollout = workers(config, Path("/r"))[0]
    assert rollout.command[1:] == ("-m", "staleflow.cli", "attach", "rollout", "--run-dir", "/r", "--name", "rollout-0")


def test_workers_work_from_when_the_run_takes_them() -> None:
    config = load(SIMULATED)
    assert {role.works for role in workers(config, Path("/r"))} == {WorkingSince.ATTACHED}
    assert {role.works for role in servers(config, Path("/r"))} == {WorkingSince.STARTED}
