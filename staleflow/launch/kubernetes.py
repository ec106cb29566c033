"""Write a run as Kubernetes objects into a folder for ``kubectl apply -k``.

| object | content |
|---|---|
| StatefulSet and Service ``NAME-servers`` | one pod with a container per server and a volume for their state |
| Job ``NAME-rollout`` | one pod per machine, with a container for the relay and for each engine |
| Job ``NAME-STAGE`` | one pod per worker of that stage |
| Job ``NAME-trainer`` | one pod per machine, under torchrun if there are several |

The kubelet restarts containers that die, and the Job controller replaces lost pods. Workers exit with the run, which
completes their Jobs and frees their GPUs. The servers keep running, so that the run can be inspected, until the folder
is deleted. Containers receive the keys that they need as files that only they can read.
"""

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.imports import is_file, split
from staleflow.configs.loading.extras import install
from staleflow.configs.loading.presence import check_package
from staleflow.configs.loading.toml import dumps
from staleflow.configs.rules.checks import import_paths
from staleflow.configs.schema import Config
from staleflow.configs.stages import stages, workers_of
from staleflow.launch.keys import FOLDER, key_file
from staleflow.launch.placement import (
    RENDEZVOUS_PORT_OFFSET,
    gpus_of_engine,
    has_relay,
    head_cpus,
    model_stages,
    torchrun_words,
)
from staleflow.launch.servers import EVERY_INTERFACE, ports, resolved
from staleflow.net.keys import ALLOWED
from staleflow.net.permissions import Role

INSTALL_YAML = install("kubernetes")
STATE = "/var/lib/staleflow"
CONFIG = "/etc/staleflow"
KEYS = "/run/staleflow/keys"
WORK = "/work"
DATA = "/data"
GPU = "nvidia.com/gpu"
WEIGHTS_GB = 100
"""Size of the servers' volume for versions of the weights if ``parameters.budget_mb`` is 0."""
MAX_RESTARTS = 1000
"""Maximum restarts of a Job's containers and pods before Kubernetes marks the Job as failed."""
MAX_NAME_LENGTH = 58
"""Maximum length of a Job's name; with the index of a pod appended it is a host name of at most 63 characters."""
MAX_RUN_NAME_LENGTH = 40
PARTS = ("servers", "rollout", "trainer")
"""Parts of a run besides the stages."""

Object = dict[str, Any]


def check(config: Config) -> None:
    """Raise ``ConfigError`` for a configuration that cannot run in pods."""
    launch, workers = config.launch, config.rollout.workers
    check_package("launch", "kubernetes", "yaml", INSTALL_YAML)
    if not launch.image:
        raise ConfigError(
            "launch.image", launch.image, "it must name a container image that contains staleflow (see Containerfile)"
        )
    if workers % launch.rollout_nodes:
        allowed = f"all pods have the same number of engines: it must divide rollout.workers, {workers}"
        raise ConfigError("launch.rollout_nodes", launch.rollout_nodes, allowed)
    if config.trainer.backend != "simulated" and not launch.volume:
        allowed = "checkpoints must outlive pods: it must name a PersistentVolumeClaim with access mode ReadWriteMany"
        raise ConfigError("launch.volume", launch.volume, allowed)
    _check_stages(config)


def files(config: Config) -> dict[str, str]:
    """Return the files of the folder without the keys, as file name -> text."""
    name = dns_name(config.name)
    objects = {
        "servers.yaml": [_service(name, config), _servers(name, config)],
        "rollout.yaml": [_rollout(name, config)],
        "stages.yaml": [_stage(name, config, stage) for stage in stages(config)],
        "trainer.yaml": _trainer(name, config),
    }
    items = {file: _yaml(of) for file, of in objects.items()}
    return {
        "kustomization.yaml": _yaml([_kustomization(name, config, objects)]),
        "config.toml": _config(config),
        **items,
    }


def apply(folder: Path) -> str:
    """Apply the folder with kubectl and return its output. Raise ``ConfigError`` if kubectl rejects it."""
    if shutil.which("kubectl") is None:
        raise ConfigError("kubectl", str(folder), "kubectl is not installed: run kubectl apply -k on this folder")
    result = subprocess.run(("kubectl", "apply", "-k", str(folder)), capture_output=True, text=True, check=False)
    if result.returncode:
        raise ConfigError("kubectl", str(folder), f"kubectl rejected the folder: {result.stderr.strip()}")
    return result.stdout.strip()


def dns_name(name: str, max_length: int = MAX_RUN_NAME_LENGTH) -> str:
    """Return ``name`` as a Kubernetes name: lower-case letters, digits and dashes, with a letter first.

    A longer name is cut and ends in a part of its digest, because long names often differ only at the end.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-")
    if len(plain) <= max_length:
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{plain[: max_length - 7].rstrip('-')}-{digest}"


def _of_stage(config: Config, stage: str) -> str:
    """Return the suffix of the names of a stage's objects, which follows the name of the run."""
    return dns_name(stage, MAX_NAME_LENGTH - 1 - len(dns_name(config.name)))


def _check_stages(config: Config) -> None:
    """Raise ``ConfigError`` if two stages, or a stage and a part of the run, would have objects of the same name."""
    owners = {part: f"the {part}" for part in PARTS}
    for stage in stages(config):
        name = _of_stage(config, stage)
        if name in owners:
            allowed = f"on Kubernetes it would have the name of {owners[name]}, {dns_name(config.name)}-{name}"
            raise ConfigError("stage.name", stage, allowed)
        owners[name] = f'stage "{stage}"'


def outside(config: Config) -> list[str]:
    """Return the paths of the configuration that are not on the volume; the container image must contain them."""
    named = [
        config.model.path,
        config.prompts.path,
        config.prompts.eval_path,
        *(given.path for given in config.prompts.sources),
        config.reference.path,
        config.critic.path,
    ]
    named += [place for spec in import_paths(config).values() if is_file(place := split(spec)[0])]
    return sorted({path for path in named if path and not path.startswith((f"{DATA}/", "hf://"))})


def _config(config: Config) -> str:
    keyed = msgspec.structs.replace(config.security, keys=KEYS)
    alone = msgspec.structs.replace(config.trajectories, mapped=False)  # no worker shares the servers' disk
    ours = msgspec.structs.replace(config, security=keyed, trajectories=alone)
    return dumps(msgspec.to_builtins(resolved(ours, Path(STATE), EVERY_INTERFACE)))


def _kustomization(name: str, config: Config, objects: Mapping[str, list[Object]]) -> Object:
    secrets = [
        {"name": f"{name}-{key}", "files": [f"{FOLDER}/{file}" for file in wanted]}
        for key, wanted in _secrets(config).items()
    ]
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [file for file, of in objects.items() if of],
        "configMapGenerator": [{"name": f"{name}-config", "files": ["config.toml"]}],
        "secretGenerator": secrets,
        "generatorOptions": {"disableNameSuffixHash": True},
        "labels": [{"pairs": {"app.kubernetes.io/name": "staleflow", "app.kubernetes.io/instance": name}}],
    }


def _secrets(config: Config) -> dict[str, list[str]]:
    """Return the key files of each part of the run."""
    looking = [key_file(Role.MONITOR), key_file(Role.ADMIN)]
    server = [key_file(Role.SERVER), ALLOWED]
    relays = has_relay(config.launch.relays, _engines(config), config.launch.rollout_nodes)
    return {
        "servers": [*server, *looking],
        "rollout": [key_file(Role.ROLLOUT), *(server if relays else [])],
        "stage": [key_file(Role.STAGE)],
        "trainer": [key_file(Role.TRAINER)],
    }


def _engines(config: Config) -> int:
    return config.rollout.workers // config.launch.rollout_nodes


def _service(name: str, config: Config) -> Object:
    named = zip(_server_names(config), ports(config), strict=True)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-servers"},
        "spec": {
            "selector": _labels(name, "servers"),
            "publishNotReadyAddresses": True,
            "ports": [{"name": server[:15], "port": port} for server, port in named],
        },
    }


def _server_names(config: Config) -> list[str]:
    shards = [f"trajectories-{shard}" for shard in range(config.trajectories.shards)]
    return ["scheduler", *shards, "parameters"]


def _servers(name: str, config: Config) -> Object:
    serve = f"staleflow serve {{}} --config {CONFIG}/config.toml --run-dir {STATE}/{name}"
    words = {"scheduler": "scheduler", "parameters": "parameters"}
    words |= {f"trajectories-{shard}": f"trajectories --shard {shard}" for shard in range(config.trajectories.shards)}
    mounts: list[Object] = [
        {"name": "state", "mountPath": STATE},
        {"name": "config", "mountPath": CONFIG, "readOnly": True},
    ]
    cpus = head_cpus(config) / len(words)
    pod = _pod(
        config,
        f"{name}-servers",
        [_container(config, one, serve.format(words[one]), mounts, cpus=cpus) for one in _server_names(config)],
        [{"name": "config", "configMap": {"name": f"{name}-config"}}],
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": f"{name}-servers"},
        "spec": {
            "replicas": 1,
            "serviceName": f"{name}-servers",
            "selector": {"matchLabels": _labels(name, "servers")},
            "template": _template(name, "servers", pod),
            "volumeClaimTemplates": [_claim(config)],
        },
    }


def _claim(config: Config) -> Object:
    maps = config.scheduler.map_mb + config.trajectories.shards * config.trajectories.map_mb
    size = -(-maps // 1024) + (-(-config.parameters.budget_mb // 1024) or WEIGHTS_GB)
    resources = {"requests": {"storage": f"{size}Gi"}}
    return {"metadata": {"name": "state"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": resources}}


def _rollout(name: str, config: Config) -> Object:
    engines, attach = _engines(config), _attach(name, config)
    index = "$JOB_COMPLETION_INDEX"
    containers = [
        _container(
            config,
            f"engine-{number}",
            f"{attach} rollout --name rollout-{index}-{number}",
            gpus=gpus_of_engine(config) if config.launch.gpus_per_node else 0,
        )
        for number in range(engines)
    ]
    if has_relay(config.launch.relays, engines, config.launch.rollout_nodes):
        words = f"{attach} relay --name relay-{index} --bind 'tcp://'$POD_IP':*'"
        words += f" --mb-per-s {config.launch.relay_mb_per_s:g}" if config.launch.relay_mb_per_s else ""
        containers.insert(0, _container(config, "relay", words))
    return _job(name, "rollout", config.launch.rollout_nodes, _pod(config, f"{name}-rollout", containers))


def _stage(name: str, config: Config, stage: str) -> Object:
    words = f"{_attach(name, config)} stage --stage {stage} --name {stage}-$JOB_COMPLETION_INDEX"
    gpus = int(stage in model_stages(config, config.launch.gpus_per_node))
    pod = _pod(config, f"{name}-stage", [_container(config, "worker", words, gpus=gpus)])
    return _job(name, _of_stage(config, stage), workers_of(config, stage), pod)


def _trainer(name: str, config: Config) -> list[Object]:
    nodes, words = config.launch.trainer_nodes, f"{_attach(name, config)} train --name trainer"
    if nodes > 1:
        meet = f"{name}-trainer-0.{name}-trainer:{config.launch.port + RENDEZVOUS_PORT_OFFSET}"
        first = "$([ $JOB_COMPLETION_INDEX = 0 ] && echo true || echo false)"
        launcher = " ".join(torchrun_words(config, nodes, meet, "$POD_IP", hosts=first))
        words = words.replace("staleflow", f"python -m torch.distributed.run {launcher} -m staleflow.cli", 1)
    gpus = config.trainer.nproc if config.launch.gpus_per_node and config.trainer.backend != "simulated" else 0
    pod = _pod(config, f"{name}-trainer", [_container(config, "trainer", words, gpus=gpus, folder=_kept(name, config))])
    if nodes == 1:
        return [_job(name, "trainer", 1, pod)]
    meeting = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-trainer"},
        "spec": {
            "clusterIP": "None",
            "selector": _labels(name, "trainer"),
            "publishNotReadyAddresses": True,
        },
    }
    return [meeting, _job(name, "trainer", nodes, {**pod, "subdomain": f"{name}-trainer"})]


def _attach(name: str, config: Config) -> str:
    return f"staleflow attach --connect tcp://{name}-servers:{config.launch.port}"


def _kept(name: str, config: Config) -> str:
    """Return the working directory of the trainer, which contains its checkpoints."""
    return f"{DATA}/{name}" if config.launch.volume else WORK


def _container(
    config: Config,
    name: str,
    words: str,
    mounts: Iterable[Object] = (),
    *,
    gpus: int = 0,
    cpus: float = 1,
    folder: str = WORK,
) -> Object:
    """Return a container that runs ``words`` in ``folder``, which is created if missing.

    ``exec`` replaces the shell, so that the signal that ends a pod reaches the process itself.
    """
    enter = f"mkdir -p {folder} && cd {folder} && " if folder != WORK else ""
    resources: Object = {"requests": {"cpu": f"{round(1000 * cpus)}m"}}
    if gpus:
        resources["limits"] = {GPU: gpus}
    return {
        "name": name,
        "image": config.launch.image,
        "command": ["sh", "-c", f"{enter}exec {words}"],
        "workingDir": WORK,
        "env": [
            {"name": "STALEFLOW_KEY", "value": KEYS},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "resources": resources,
        "volumeMounts": [*_mounts(config), *mounts],
    }


def _mounts(config: Config) -> list[Object]:
    items: list[Object] = [
        {"name": "keys", "mountPath": KEYS},
        {"name": "work", "mountPath": WORK},
        {"name": "memory", "mountPath": "/dev/shm"},
    ]
    return [*items, *([{"name": "data", "mountPath": DATA}] if config.launch.volume else [])]


def _pod(config: Config, part: str, containers: list[Object], volumes: Iterable[Object] = ()) -> Object:
    """Return a pod of ``part``, which is also the name of its Secret.

    An init container copies the keys to a memory volume with mode 0600, because files of a mounted Secret are readable
    by the pod's group.
    """
    copy = f"umask 077 && cp /secret/* {KEYS}/ && chmod 600 {KEYS}/*"
    copying = {
        "name": "keys",
        "image": config.launch.image,
        "command": ["sh", "-c", f"{copy}{_await_servers(part, config)}"],
        "volumeMounts": [
            {"name": "keys", "mountPath": KEYS},
            {"name": "secret", "mountPath": "/secret", "readOnly": True},
        ],
    }
    items: list[Object] = [
        {"name": "secret", "secret": {"secretName": part, "defaultMode": 0o440}},
        {"name": "keys", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "work", "emptyDir": {}},
        *volumes,
    ]
    if config.launch.volume:
        items.append({"name": "data", "persistentVolumeClaim": {"claimName": config.launch.volume}})
    return {
        "initContainers": [copying],
        "containers": containers,
        "volumes": items,
        "securityContext": {"fsGroup": 1000},
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
    }


def _await_servers(part: str, config: Config) -> str:
    """Return a shell suffix that waits for the servers; waiting in the init container does not count as a failure."""
    name = dns_name(config.name)
    if part == f"{name}-servers":
        return ""
    look = f"import socket; socket.create_connection(('{name}-servers', {config.launch.port}), 3)"
    return f' && until python3 -c "{look}" 2>/dev/null; do sleep 2; done'


def _job(name: str, what: str, pods: int, pod: Object) -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{name}-{what}"},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimit": MAX_RESTARTS,
            "template": _template(name, what, {**pod, "restartPolicy": "OnFailure"}),
        },
    }


def _template(name: str, part: str, pod: Object) -> Object:
    return {"metadata": {"labels": _labels(name, part)}, "spec": pod}


def _labels(name: str, part: str) -> Object:
    """Return separate labels for run and part; one concatenated label could be the same for two runs."""
    return {"staleflow/run": name, "staleflow/part": part}


def _yaml(objects: Iterable[Object]) -> str:
    import yaml

    class Plain(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: object) -> bool:
            return True  # write repeated objects in full instead of YAML anchors

    return str(yaml.dump_all(list(objects), Dumper=Plain, sort_keys=False, width=120))
