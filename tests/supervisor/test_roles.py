"""Which processes a run has."""

from pathlib import Path

from staleflow.configs.load import load
from staleflow.supervisor.roles import Kind, servers, workers

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


def test_a_role_is_started_as_a_person_would_start_it() -> None:
    config = load(SIMULATED)
    shard = servers(config, Path("/r"))[1]
    assert shard.command[1:] == ("-m", "staleflow.cli", "serve", "trajectories", "--shard", "0", "--run-dir", "/r")
    rollout = workers(config, Path("/r"))[0]
    assert rollout.command[1:] == ("-m", "staleflow.cli", "attach", "rollout", "--run-dir", "/r", "--name", "rollout-0")
