"""In a folder of Kubernetes objects every referenced name exists, and the commands of the pods form a run."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.schema import Config
from staleflow.configs.stages import RESERVED
from staleflow.launch import kubernetes
from staleflow.net.key_folder import make_keys
from staleflow.trace.audit.report import audit

CLUSTER = Path(__file__).parent.parent.parent / "configs" / "cluster.toml"
REAL = (
    *("rollout.engine=vllm", "trainer.backend=fsdp", "model.path=/data/model", "launch.gpus_per_node=8"),
    *("rollout.vllm.tensor_parallel=2", "rollout.workers=8", "trainer.nproc=4", "trainer.batch_size=64"),
    *("launch.trainer_nodes=2", "launch.volume=models", "trainer.algorithm.kl_coef=0.01", "trajectories.shards=2"),
)
Object = dict[str, Any]


def objects(config: Config) -> list[Object]:
    return [
        one
        for name, text in kubernetes.files(config).items()
        if name.endswith(".yaml")
        for one in yaml.safe_load_all(text)
    ]


def pods(found: list[Object]) -> dict[str, Object]:
    """Object name -> specification of its pods."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in found if "template" in one.get("spec", {})
    }


@pytest.mark.parametrize("overrides", [(), REAL], ids=["simulated", "real"])
def test_whatever_an_object_names_is_there(overrides: tuple[str, ...]) -> None:
    found = objects(load(CLUSTER, overrides))
    kustomization = next(one for one in found if one["kind"] == "Kustomization")
    made = {one["name"] for key in ("configMapGenerator", "secretGenerator") for one in kustomization[key]}
    services = {one["metadata"]["name"]: one for one in found if one["kind"] == "Service"}
    labels = {tuple(labels_of(one).items()) for one in found if "spec" in one}
    assert {tuple(service["spec"]["selector"].items()) for service in services.values()} <= labels
    for pod in pods(found).values():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            assert volume.get("secret", {}).get("secretName", next(iter(made))) in made
            assert volume.get("configMap", {}).get("name", next(iter(made))) in made
        for container in (*pod["initContainers"], *pod["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= {*volumes, "state"}
            if reached := re.search(r"tcp://([a-z0-9-]+):(\d+)", container["command"][-1]):
                assert int(reached[2]) in {port["port"] for port in services[reached[1]]["spec"]["ports"]}


def test_gpus_of_a_real_run() -> None:
    found = pods(objects(load(CLUSTER, REAL)))
    asked = {
        name: [container["resources"].get("limits", {}).get("nvidia.com/gpu", 0) for container in pod["containers"]]
        for name, pod in found.items()
    }
    assert asked == {
        "cluster-servers": [0, 0, 0, 0],
        "cluster-rollout": [0, 2, 2, 2, 2],
        "cluster-reward": [0],
        "cluster-reference": [1],
        "cluster-trainer": [4],
    }


@pytest.mark.parametrize(("relays", "wanted"), [("auto", True), ("all", True), ("none", False)])
def test_a_relay_and_the_key_that_it_listens_with_are_where_the_configuration_says(relays: str, wanted: bool) -> None:
    files = kubernetes.files(load(CLUSTER, [f"launch.relays={relays}", "launch.relay_mb_per_s=60"]))
    pod = yaml.safe_load(files["rollout.yaml"])["spec"]["template"]["spec"]
    named = {container["name"]: str(container["command"]) for container in pod["containers"]}
    secrets = {one["name"]: str(one["files"]) for one in yaml.safe_load(files["kustomization.yaml"])["secretGenerator"]}
    assert ("relay" in named) == wanted
    assert ("--mb-per-s 60" in named.get("relay", "")) == wanted
    assert ("server.key" in secrets["cluster-rollout"]) == wanted


def test_each_pod_has_the_keys_of_its_role_and_no_other() -> None:
    kustomization = yaml.safe_load(kubernetes.files(load(CLUSTER, ["rollout.workers=2"]))["kustomization.yaml"])
    handed = {one["name"]: [Path(file).name for file in one["files"]] for one in kustomization["secretGenerator"]}
    assert handed == {
        "cluster-servers": ["server.key", "allowed.toml", "monitor.key", "admin.key"],
        "cluster-rollout": ["rollout.key"],
        "cluster-stage": ["stage.key"],
        "cluster-trainer": ["trainer.key"],
    }


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["launch.image="], 'launch.image is ""; it must name a container image'),
        (
            ["rollout.workers=1", "rollout.pool=[{workers=2}]"],
            "rollout.pool is [{'workers': 2}]; all rollout pods are the same; leave it out, and run staleflow attach",
        ),
        (
            ["rollout.workers=5"],
            "launch.rollout_nodes is 2; all pods have the same number of engines: it must divide rollout.workers, 5",
        ),
        ([*REAL, "launch.volume="], 'launch.volume is ""; checkpoints must outlive pods'),
        (
            ['stage=[{name="servers", run="m:f", makes=["x"]}]'],
            'stage.name is "servers"; on Kubernetes it would have the name of the servers, cluster-servers',
        ),
        (
            ['stage=[{name="a_b", run="m:f", makes=["x"]}, {name="a__b", run="m:f", makes=["x"]}]'],
            'stage.name is "a__b"; on Kubernetes it would have the name of stage "a_b", cluster-a-b',
        ),
    ],
)
def test_what_cannot_be_pods_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        kubernetes.check(load(CLUSTER, overrides))
    assert said in str(refused.value)


def test_names_are_those_that_kubernetes_takes() -> None:
    names = ("Qwen3_8B.v2", "7b.run", "...", "a" * 40, "a" * 41)
    assert [kubernetes.dns_name(name) for name in names] == [
        *("qwen3-8b-v2", "run-7b-run", "run", "a" * 40),
        f"{'a' * 33}-c0f8bd",
    ]
    assert kubernetes.dns_name("sweep-" * 8 + "1") != kubernetes.dns_name("sweep-" * 8 + "2")


def staged(name: str, *stages: str, workers: int) -> Config:
    given = ", ".join(f'{{name="{stage}", run="m:f", makes=["x"], workers={workers}}}' for stage in stages)
    return load(CLUSTER, [*REAL, f'name="{name}"', f"stage=[{given}]"])


def labels_of(one: Object) -> Object:
    """Specification of an object's pods; none if it has no pods."""
    return dict(one["spec"].get("template", {}).get("metadata", {}).get("labels", {}))


@settings(max_examples=20)
@example(name="7b.run", stages=[])
@example(name="x" * 80, stages=["b" * 40, "b" * 39])
@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}", fullmatch=True),
    stages=st.lists(st.from_regex(r"[a-z][a-z0-9_]{0,39}", fullmatch=True), max_size=4, unique=True),
)
def test_whatever_a_run_and_its_stages_are_called_objects_have_names_of_their_own(name: str, stages: list[str]) -> None:
    plain = {re.sub("_+", "-", stage.strip("_")) for stage in stages}
    assume(not plain & {*RESERVED, *kubernetes.PARTS} and len(plain) == len(stages))  # others are rejected
    config = staged(name, *stages, workers=4096)
    kubernetes.check(config)
    found = [one for one in objects(config) if "metadata" in one]
    named = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(named) == len(set(named))
    labelled = [tuple(labels.values()) for one in found if (labels := labels_of(one))]
    assert len(labelled) == len(set(labelled)) == 5 + len(stages), "a selector finds the pods of one object"
    hosts = [f"{job}-4095" if kind == "Job" else job for kind, job in named]
    assert [host for host in hosts if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", host)] == []


@pytest.fixture
def applied(short_dir: Path) -> Path:
    """The folder as ``kubectl apply`` receives it."""
    config = load(CLUSTER, ["trainer.steps=10", "launch.port=25551"])
    for name, text in kubernetes.files(config).items():
        (short_dir / name).write_text(text)
    make_keys(short_dir / "keys")
    return short_dir


@pytest.mark.long
def test_the_commands_of_the_pods_are_a_run(applied: Path) -> None:
    """Run each container as a process of this machine, its mounts as folders."""
    found = pods(objects(load(CLUSTER, ["trainer.steps=10", "launch.port=25551"])))
    kustomization = yaml.safe_load((applied / "kustomization.yaml").read_text())
    secrets = {one["name"]: one["files"] for one in kustomization["secretGenerator"]}
    places = {"STATE": applied / "state", "CONFIG": applied}
    (applied / "config.toml").write_text(
        (applied / "config.toml").read_text().replace(kubernetes.KEYS, str(applied / "keys"))
    )
    running: list[subprocess.Popen[bytes]] = []
    logs = (applied / "said").open("wb")
    try:
        for name, pod in found.items():
            mine = applied / name
            (mine / "secret").mkdir(parents=True)
            (mine / "keys").mkdir()
            for file in secrets[pod["volumes"][0]["secret"]["secretName"]]:
                shutil.copy(applied / file, mine / "secret")
            mounts = {**places, "KEYS": mine / "keys", "secret": mine / "secret"}
            subprocess.run(_here(pod["initContainers"][0]["command"], mounts), check=True)
            for index in range(2 if name == "cluster-rollout" else 1):
                for container in pod["containers"]:
                    env = {
                        "JOB_COMPLETION_INDEX": str(index),
                        "POD_IP": "127.0.0.1",
                        "STALEFLOW_KEY": str(mine / "keys"),
                    }
                    work = mine / f"work-{index}"
                    work.mkdir(exist_ok=True)
                    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
                    command = _here(container["command"], mounts)
                    started = subprocess.Popen(command, env={**env, "PATH": path}, cwd=work, stdout=logs, stderr=logs)
                    running.append(started)
        workers = running[3:]
        deadline = time.monotonic() + 90
        while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert [worker.poll() for worker in workers] == [0] * 8, (applied / "said").read_text()
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(timeout=20)
        logs.close()
    assert audit(applied / "state" / "cluster" / "trace.jsonl").num_violations == 0


def _here(command: list[str], mounts: dict[str, Path]) -> list[str]:
    text = command[-1].replace("cluster-servers", "127.0.0.1")
    text = text.replace(kubernetes.STATE, str(mounts["STATE"])).replace(kubernetes.CONFIG, str(mounts["CONFIG"]))
    text = text.replace(kubernetes.KEYS, str(mounts["KEYS"])).replace("/secret/", f"{mounts['secret']}/")
    return [*command[:-1], text]
