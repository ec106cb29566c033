"""Every process of a run is on one machine, with GPUs of its own, whatever the numbers."""

import sys
from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.launch import share
from staleflow.configs.loading.load import load
from staleflow.configs.schema import Config
from staleflow.launch import machine, placement
from staleflow.launch.placement import Place
from staleflow.net.errors import RunOver
from staleflow.supervisor import roles
from staleflow.supervisor.drain import MACHINE_TIMEOUT_S
from staleflow.supervisor.roles import Role, WorkingSince

CLUSTER = Path(__file__).parent.parent.parent / "configs" / "cluster.toml"
REAL = (
    *("rollout.engine=vllm", "trainer.backend=fsdp", "model.path=/data/model", "launch.gpus_per_node=8"),
    *("rollout.vllm.tensor_parallel=2", "rollout.workers=8", "trainer.nproc=4", "trainer.batch_size=64"),
)
HERE, THERE = Path("/run/a"), "tcp://10.0.0.1:5551"


def cluster(*overrides: str) -> Config:
    return load(CLUSTER, overrides)


def words(config: Config) -> dict[str, tuple[str, ...]]:
    """Name -> command of each process on each machine except the head."""
    found: dict[str, tuple[str, ...]] = {}
    for place in placement.places(config):
        if place.part == "rollout":
            there = placement.rollout_roles(config, HERE, THERE, place, "tcp://10.0.0.7:*")
        else:
            there = placement.trainer_roles(config, HERE, THERE, place, "10.0.0.2:5651", "10.0.0.3")
        for role in there:
            assert role.name not in found, "each name once in the run"
            found[role.name] = role.command
    return found


def test_a_launched_run_has_the_workers_of_a_run_here_and_a_relay_where_engines_share_weights() -> None:
    config = cluster("rollout.workers=5", "launch.rollout_nodes=2")
    placed = {*words(config), *(role.name for role in placement.head_stages(config, HERE, 0))}
    assert placed == {role.name for role in roles.workers(config, HERE)} | {"relay-0", "relay-1"}


@pytest.mark.parametrize(
    ("relays", "workers", "machines", "wanted"),
    [
        ("auto", 3, 2, {"relay-0"}),  # the machine with two engines
        ("auto", 5, 5, {"relay-0", "relay-1", "relay-2", "relay-3", "relay-4"}),
        ("all", 3, 2, {"relay-0", "relay-1"}),
        ("none", 5, 2, set[str]()),
    ],
)
def test_a_relay_is_on_the_machines_that_the_configuration_says(
    relays: str, workers: int, machines: int, wanted: set[str]
) -> None:
    config = cluster(f"rollout.workers={workers}", f"launch.rollout_nodes={machines}", f"launch.relays={relays}")
    assert {name for name in words(config) if name.startswith("relay")} == wanted


def test_a_machine_that_is_told_its_words_has_the_relays_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    config = cluster("launch.relays=all", "launch.relay_mb_per_s=60", "rollout.workers=2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # otherwise machine.main leaves it set
    told: list[Place] = []

    def roles_of(config: Config, folder: Path, connect: str, place: Place, meet: str) -> list[Role]:
        told.append(place)
        raise ConfigError("machine", place.name, "this test has seen enough")

    def join_with_retry(connect: str, word: str) -> tuple[Config, Path]:
        return config, HERE

    monkeypatch.setattr(machine, "join_with_retry", join_with_retry)
    monkeypatch.setattr(machine, "roles_of", roles_of)
    for place in placement.places(config):
        assert machine.main(placement.machine_words(place, THERE, "10.0.0.2:5651")[2:]) == 2
    rollout = [place for place in told if place.part == "rollout"]
    assert rollout == [place for place in placement.places(config) if place.part == "rollout"]
    relay = placement.rollout_roles(config, HERE, THERE, rollout[1], "tcp://10.0.0.7:*")[0]
    assert relay.command[-4:] == ("--bind", "tcp://10.0.0.7:*", "--mb-per-s", "60")


def test_a_machine_that_comes_after_the_end_of_the_run_ends_well(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def join_with_retry(connect: str, word: str) -> tuple[Config, Path]:
        raise RunOver

    held = list[float]()
    monkeypatch.setattr(machine, "join_with_retry", join_with_retry)
    monkeypatch.setattr("staleflow.launch.machine.lifeline.watch_supervisor", held.append)
    assert machine.main(["rollout", "--connect", THERE]) == 0
    assert held == [MACHINE_TIMEOUT_S], "its trainer may save"
    assert capfd.readouterr().out == "staleflow: the run is over\n"


def test_a_worker_is_told_where_the_scheduler_is() -> None:
    command = words(cluster())["rollout-3"]
    attach = (
        "-m",
        "staleflow.cli",
        "attach",
        "rollout",
        "--run-dir",
        "/run/a",
        "--name",
        "rollout-3",
        "--connect",
        THERE,
    )
    assert command == (sys.executable, *attach)


@pytest.mark.parametrize(("count", "machines"), [(5, 2), (4, 4), (7, 3), (1, 1)])
def test_shares_are_even_and_whole(count: int, machines: int) -> None:
    shares = [share(count, machine, machines) for machine in range(machines)]
    assert [one for part in shares for one in part] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_gpus_are_given_out_once_engines_by_their_width_and_judges_behind_the_ranks() -> None:
    config = cluster(*REAL, "trainer.algorithm.kl_coef=0.01", "reference.workers=2")
    rollout = Place(part="rollout", number=1, machines=2, gpus=8)
    engines = placement.rollout_roles(config, HERE, THERE, rollout, "tcp://10.0.0.7:*")
    assert [(role.name, role.gpus) for role in engines] == [
        ("relay-1", ()),
        *((f"rollout-{4 + at}", (2 * at, 2 * at + 1)) for at in range(4)),
    ]
    trainer = placement.trainer_roles(config, HERE, THERE, Place(part="trainer", number=0, machines=1, gpus=8), "", "")
    assert [(role.name, role.gpus) for role in trainer] == [
        ("reference-0", (4,)),
        ("reference-1", (5,)),
        ("trainer", (0, 1, 2, 3)),
    ]
    assert {role.works for role in (*engines, *trainer)} == {WorkingSince.ATTACHED}
    assert [role.name for role in placement.head_stages(config, HERE, 8)] == ["reward-0"]


def test_ranks_of_several_machines_meet_under_torchrun_at_the_first() -> None:
    found = words(cluster(*REAL, "launch.trainer_nodes=2"))
    first, second = found["trainer"], found["trainer-1"]
    assert {"--nnodes=2", "--local-addr=10.0.0.3", "--nproc-per-node=4", "--rdzv-endpoint=10.0.0.2:5651"} <= set(first)
    assert ("--rdzv-conf=is_host=true" in first, "--rdzv-conf=is_host=false" in second) == (True, True)
    assert first[-8:] == second[-8:] == (*first[-8:-4], "--name", "trainer", "--connect", THERE)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["launch.rollout_nodes=9"], "launch.rollout_nodes is 9; it must be at most rollout.workers, 4"),
        (["rollout.gpus=[0]"], "rollout.gpus is [0]; launch.gpus_per_node assigns the GPUs of launched machines"),
        (
            ["launch.trainer_nodes=2"],
            'launch.trainer_nodes is 2; with trainer.backend "simulated", which is one process',
        ),
        ([*REAL, "rollout.workers=12"], "launch.gpus_per_node is 8; 6 engines a machine need 12"),
        ([*REAL, "trainer.nproc=9"], "launch.gpus_per_node is 8; the first trainer machine needs 9"),
        ([*REAL, "trainer.batch_size=6", "launch.trainer_nodes=2"], "trainer.nproc is 8"),
    ],
)
def test_what_cannot_be_placed_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        placement.check(cluster(*overrides))
    assert said in str(refused.value)


def test_what_fits_is_not_refused() -> None:
    placement.check(cluster())
    placement.check(cluster(*REAL, "launch.trainer_nodes=2", "trainer.algorithm.kl_coef=0.01"))


def test_workers_of_several_pools_have_their_own_gpus_and_settings() -> None:
    pools = "rollout.pool=[{workers=3}, {workers=3, engine='transformers', threads=4, vllm={tensor_parallel=1}}]"
    config = cluster(*REAL, "rollout.workers=1", pools, "launch.rollout_nodes=2", "launch.relays=none")
    placement.check(config)
    placed = [
        {role.name: role.gpus for role in placement.rollout_roles(config, HERE, THERE, place, "")}
        for place in placement.places(config)
        if place.part == "rollout"
    ]
    assert placed == [
        {"rollout-0": (0, 1), "rollout-1": (2, 3), "rollout-2": (4, 5)},
        {"rollout-3": (0,), "rollout-4": (1,), "rollout-5": (2,)},
    ]
    assert 'rollout.engine="transformers"' in words(config)["rollout-3"]
    assert placement.machine_cpus(config, "rollout") == 12
    with pytest.raises(ConfigError, match=r"gpus_per_node is 5; 3 engines a machine need 6: more"):
        placement.check(cluster(*REAL, "rollout.workers=1", pools, "launch.rollout_nodes=2", "launch.gpus_per_node=5"))
