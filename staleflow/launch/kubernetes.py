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
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.imports import is_file, split
from staleflow.configs.loading.toml import dumps
from staleflow.configs.pools import gpus_of_engine
from staleflow.configs.rules.checks import import_paths
from staleflow.configs.schema import Config
from staleflow.configs.stages import stages, workers_of
from staleflow.launch.keys import FOLDER, key_file
from staleflow.launch.placement import (
    RENDEZVOUS_PORT_OFFSET,
    has_relay,
    head_cpus,
    model_stages,
    torchrun_words,
)
from staleflow.launch.servers import EVERY_INTERFACE, ports, resolved
from staleflow.net.keys import ALLOWED
from staleflow.net.permissions import Role

STATE = "/var/lib/staleflow"
CONFIG = "/etc/staleflow"
KEYS = "/run/staleflow/keys"
WORK = "/work"
DATA = "/data"
WEIGHTS_GB = 100
"""Size of the servers' volume for versions of the weights if ``parameters.budget_mb`` is 0."""
MAX_RESTARTS = 1000
"""Maximum restarts of a Job's containers and pods before Kubernetes marks the Job as failed."""
MAX_NAME_LENGTH = 58
"""Maximum length of a Job's name; with the index of a pod appended it is a host name of at most 63 characters."""
MAX_RUN_NAME_LENGTH = 40
PARTS = ("servers", "rollout", "trainer")
"""Parts of a run besides the stages."""
RESOURCES = ("servers.yaml", "rollout.yaml", "stages.yaml", "trainer.yaml")


def check(config: Config) -> None:
    """Raise ``ConfigError`` for a configuration that cannot run in pods."""
    launch, workers = config.launch, config.rollout.workers
    if config.rollout.pool:
        allowed = "all rollout pods are the same; leave it out, and run staleflow attach rollout in Jobs of your own"
        raise ConfigError("rollout.pool", config.rollout.pool, allowed)
    if most := config.rollout.elastic.max_workers:
        allowed = "Kubernetes starts a fixed number of pods: leave it at 0, and add Jobs of staleflow attach rollout"
        raise ConfigError("rollout.elastic.max_workers", most, allowed)
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
    """Return the files of the folder without the keys, as file name -> text. The objects are in ``manifests/``."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("staleflow.launch", "manifests"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quoted"] = partial(json.dumps, ensure_ascii=False)  # a JSON string is a YAML string
    values = _values(config)
    templates = ("kustomization.yaml", *RESOURCES)
    return {
        "config.toml": _config(config),
        **{name: environment.get_template(name).render(values) for name in templates},
    }


def _values(config: Config) -> dict[str, Any]:
    """Return the values that the templates insert."""
    name, port, job_stages = dns_name(config.name), config.launch.port, [_stage(config, one) for one in stages(config)]
    look = f"import socket; socket.create_connection(('{name}-servers', {port}), 3)"
    return {
        "name": name,
        "launch": config.launch,
        "resources": [file for file in RESOURCES if file != "stages.yaml" or job_stages],
        "secrets": _secrets(config),
        "servers_at": list(zip(_server_names(config), ports(config), strict=True)),
        "state_gib": _state_gib(config),
        "servers": _servers(config),
        "rollout": _rollout(config),
        "stages": job_stages,
        "trainer": _trainer(config),
        "copy_keys": f"umask 077 && cp /secret/* {KEYS}/ && chmod 600 {KEYS}/*",
        "wait_for_servers": f' && until python3 -c "{look}" 2>/dev/null; do sleep 2; done',
        "max_restarts": MAX_RESTARTS,
        "state": STATE,
        "config": CONFIG,
        "keys": KEYS,
        "work": WORK,
        "data": DATA,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container of a pod. The kubelet restarts it when it ends with an error."""

    name: str
    command: str
    """Shell command. ``exec`` replaces the shell, so that the signal that ends a pod reaches the process itself."""
    gpus: int = 0
    millicpus: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The pods of one object."""

    part: str
    """Suffix of the object's name, after the name of the run; label of its pods."""
    secret: str
    """Suffix of the name of the Secret with its keys."""
    containers: list[Container]
    count: int = 1
    subdomain: str = ""


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


def _secrets(config: Config) -> dict[str, list[str]]:
    """Return the key files of each part of the run."""
    looking = [key_file(Role.MONITOR), key_file(Role.ADMIN)]
    server = [key_file(Role.SERVER), ALLOWED]
    relays = has_relay(config.launch.relays, _engines(config), config.launch.rollout_nodes)
    wanted = {
        "servers": [*server, *looking],
        "rollout": [key_file(Role.ROLLOUT), *(server if relays else [])],
        "stage": [key_file(Role.STAGE)],
        "trainer": [key_file(Role.TRAINER)],
    }
    return {part: [f"{FOLDER}/{file}" for file in names] for part, names in wanted.items()}


def _engines(config: Config) -> int:
    return config.rollout.workers // config.launch.rollout_nodes


def _server_names(config: Config) -> list[str]:
    shards = [f"trajectories-{shard}" for shard in range(config.trajectories.shards)]
    return ["scheduler", *shards, "parameters"]


def _state_gib(config: Config) -> int:
    """Return the size of the servers' volume."""
    maps = config.scheduler.map_mb + config.trajectories.shards * config.trajectories.map_mb
    return -(-maps // 1024) + (-(-config.parameters.budget_mb // 1024) or WEIGHTS_GB)


def _servers(config: Config) -> Pod:
    options = f"--config {CONFIG}/config.toml --run-dir {STATE}/{dns_name(config.name)}"
    words = {"scheduler": "scheduler", "parameters": "parameters"}
    words |= {f"trajectories-{shard}": f"trajectories --shard {shard}" for shard in range(config.trajectories.shards)}
    millicpus = round(1000 * (head_cpus(config) / len(words)))
    containers = [
        Container(name=one, command=f"exec staleflow serve {words[one]} {options}", millicpus=millicpus)
        for one in _server_names(config)
    ]
    return Pod(part="servers", secret="servers", containers=containers)


def _rollout(config: Config) -> Pod:
    engines, attach, launch = _engines(config), _attach(config), config.launch
    index, gpus = "$JOB_COMPLETION_INDEX", gpus_of_engine(config) if launch.gpus_per_node else 0
    containers = [
        Container(name=f"engine-{number}", command=f"{attach} rollout --name rollout-{index}-{number}", gpus=gpus)
        for number in range(engines)
    ]
    if has_relay(launch.relays, engines, launch.rollout_nodes):
        words = f"{attach} relay --name relay-{index} --bind 'tcp://'$POD_IP':*'"
        words += f" --mb-per-s {launch.relay_mb_per_s:g}" if launch.relay_mb_per_s else ""
        containers.insert(0, Container(name="relay", command=words))
    return Pod(part="rollout", secret="rollout", containers=containers, count=launch.rollout_nodes)


def _stage(config: Config, stage: str) -> Pod:
    words = f"{_attach(config)} stage --stage {stage} --name {stage}-$JOB_COMPLETION_INDEX"
    gpus = int(stage in model_stages(config, config.launch.gpus_per_node))
    worker = Container(name="worker", command=words, gpus=gpus)
    return Pod(part=_of_stage(config, stage), secret="stage", containers=[worker], count=workers_of(config, stage))


def _trainer(config: Config) -> Pod:
    name, nodes = dns_name(config.name), config.launch.trainer_nodes
    words = f"{_attach(config)} train --name trainer"
    if nodes > 1:
        meet = f"{name}-trainer-0.{name}-trainer:{config.launch.port + RENDEZVOUS_PORT_OFFSET}"
        first = "$([ $JOB_COMPLETION_INDEX = 0 ] && echo true || echo false)"
        launcher = " ".join(torchrun_words(config, nodes, meet, "$POD_IP", hosts=first))
        words = words.replace("staleflow", f"python -m torch.distributed.run {launcher} -m staleflow.cli", 1)
    if config.launch.volume:  # the working directory contains the checkpoints
        words = f"mkdir -p {DATA}/{name} && cd {DATA}/{name} && {words}"
    gpus = config.trainer.nproc if config.launch.gpus_per_node and config.trainer.backend != "simulated" else 0
    return Pod(
        part="trainer",
        secret="trainer",
        containers=[Container(name="trainer", command=words, gpus=gpus)],
        count=nodes,
        subdomain=f"{name}-trainer" if nodes > 1 else "",
    )


def _attach(config: Config) -> str:
    return f"exec staleflow attach --connect tcp://{dns_name(config.name)}-servers:{config.launch.port}"
