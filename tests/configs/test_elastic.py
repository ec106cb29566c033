"""Limits of the number of rollout workers: spare workers, their settings, and what is refused."""

from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load, resumed
from staleflow.configs.pools import at_most, workers
from staleflow.launch import kubernetes
from staleflow.launch.placement import names_on, place_of
from staleflow.supervisor import roles
from staleflow.supervisor.elastic import Spares

CONFIGS = Path(__file__).parent.parent.parent / "configs"
SIMULATED = CONFIGS / "simulated.toml"
MOST = "rollout.elastic.max_workers"


def test_a_run_with_limits_has_spare_workers_that_are_not_started() -> None:
    config = load(SIMULATED, [f"{MOST}=4"])
    every = [role for role in roles.workers(config, Path("r")) if role.name.startswith("rollout")]
    assert [(role.name, role.elastic, role.spare) for role in every] == [
        ("rollout-0", True, False),
        ("rollout-1", True, False),
        ("rollout-2", True, True),
        ("rollout-3", True, True),
    ]
    assert not any(role.elastic or role.spare for role in roles.workers(load(SIMULATED), Path("r")))


def test_further_workers_have_the_settings_of_the_last_pool() -> None:
    pool = "rollout.pool=[{max_inflight=8}, {workers=2, max_inflight=16}]"
    config = load(SIMULATED, ["rollout.workers=1", pool, f"{MOST}=5"])
    assert [worker.rollout.max_inflight for worker in workers(at_most(config))] == [8, 16, 16, 16, 16]
    assert at_most(load(SIMULATED)) == load(SIMULATED)


def test_a_launched_machine_has_room_for_its_part_of_the_maximum() -> None:
    config = load(CONFIGS / "cluster.toml", ["rollout.workers=2", f"{MOST}=6", "launch.rollout_nodes=2"])
    machines = [names_on(config, place_of(config, "rollout", 2, number)) for number in range(2)]
    engines = [[name for name in names if name.startswith("rollout")] for names in machines]
    assert engines == [["rollout-0", "rollout-1", "rollout-2"], ["rollout-3", "rollout-4", "rollout-5"]]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{MOST}=1"], "max_workers is 1; it must be at least the number of rollout workers at the start, 2"),
        ([f"{MOST}=4", "rollout.elastic.min_workers=3"], "min_workers is 3; it must be at most the number .* start, 2"),
        (["rollout.elastic.min_workers=2"], "min_workers is 2; it has no effect without rollout.elastic.max_workers"),
        (
            ["rollout.engine=vllm_server", "rollout.workers=1", "model.path=/m", f"{MOST}=2"],
            "further workers would share the vLLM server of rollout: it must be 1",
        ),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(SIMULATED, overrides)


def test_kubernetes_starts_a_fixed_number_of_pods() -> None:
    with pytest.raises(ConfigError, match="Kubernetes starts a fixed number of pods"):
        kubernetes.check(load(CONFIGS / "cluster.toml", [f"{MOST}=8", "launch.image=i"]))


def test_a_resume_may_change_the_number_of_workers_and_their_limits() -> None:
    changed = resumed(load(SIMULATED), ["rollout.workers=3", f"{MOST}=4"])
    assert (changed.rollout.workers, changed.rollout.elastic.max_workers) == (3, 4)


def test_a_worker_that_is_not_wanted_becomes_a_spare_and_can_start_again() -> None:
    first, second, trainer = (
        role for role in roles.workers(load(SIMULATED, [f"{MOST}=2"]), Path("r")) if "reward" not in role.name
    )
    spares = Spares([])
    assert not spares.keep(first, ()), "no answer of the scheduler yet"
    assert not spares.keep(first, ("rollout-0", "rollout-1"))
    assert not spares.keep(trainer, ("rollout-0",))
    assert spares.keep(second, ("rollout-0",))
    assert spares.take(("rollout-0",)) == []
    assert spares.take(("rollout-0", "rollout-1")) == [second]
    assert spares.take(("rollout-0", "rollout-1")) == []
