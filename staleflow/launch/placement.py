"""Which processes of a run are on which machine. Pure.

- **Head**: the servers and the stages without a model; with ``launch.gpus_per_node`` 0 all stages.
- **Rollout machines**: ``rollout.workers`` engines, spread evenly; by ``launch.relays`` a relay beside them, so that
  weights come to the machine once; where there are many machines on each of them, which makes a tree.
- **Trainer machines**: ``trainer.nproc`` ranks on each; on the first one, on the GPUs that are left, the stages with a
  model.

A machine is told its part, its number and the scheduler's address; the rest it works out from the run's configuration.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from staleflow.configs.errors import ConfigError
from staleflow.configs.launch import Relays, most, share
from staleflow.configs.rules.checks import check_ranks
from staleflow.configs.schema import Config
from staleflow.configs.stages import stages, threads_of, workers_of
from staleflow.protocols.wire.stages import CRITIC, REFERENCE
from staleflow.supervisor import roles
from staleflow.supervisor.roles import Kind, Role, Works

Part = Literal["rollout", "trainer"]
PARTS: tuple[Part, ...] = get_args(Part)
MODEL_STAGES = (REFERENCE, CRITIC)
SERVER_CPUS = 2
"""Processors of one server; a scheduler needs one, a trajectory server up to two."""


RANK_RESTARTS = 10
"""Times that torchrun starts all ranks anew; then its machine's supervisor has its own patience."""
ALONE = 4
"""Rollout machines that may each take weights from the parameter server itself; more of them make a tree of relays."""
MEET = 100
"""The ranks of several machines meet at this many ports above ``launch.port``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One machine among those of its part."""

    part: Part
    number: int
    machines: int
    gpus: int
    """That it may use; 0: whatever it has, without asking."""
    relays: Relays = "auto"
    """``launch.relays``."""
    mb_per_s: float = 0.0
    """``launch.relay_mb_per_s``."""

    @property
    def name(self) -> str:
        """Unique in the run; also the name of its log."""
        return f"{self.part}-machine-{self.number}"


def places(config: Config) -> list[Place]:
    """Every machine besides the head: the trainer's, then those of rollout."""
    launch = config.launch
    counts: dict[Part, int] = {"trainer": launch.trainer_nodes, "rollout": launch.rollout_nodes}
    return [place_of(config, part, count, number) for part, count in counts.items() for number in range(count)]


def place_of(config: Config, part: Part, machines: int, number: int = 0) -> Place:
    """One machine of ``config.launch``."""
    launch = config.launch
    return Place(
        part=part,
        number=number,
        machines=machines,
        gpus=launch.gpus_per_node,
        relays=launch.relays,
        mb_per_s=launch.relay_mb_per_s,
    )


def check(config: Config) -> None:
    """``ConfigError`` for the first thing that cannot be spread over machines as ``config.launch`` says."""
    launch, workers = config.launch, config.rollout.workers
    if launch.rollout_nodes > workers:
        allowed = f"it must be at most rollout.workers, {workers}: each machine has one engine at least"
        raise ConfigError("launch.rollout_nodes", launch.rollout_nodes, allowed)
    for key, gpus in (("rollout.gpus", config.rollout.gpus), ("trainer.gpus", config.trainer.gpus)):
        if gpus:
            raise ConfigError(
                key, gpus, "GPUs of launched machines are given out by launch.gpus_per_node: leave it empty"
            )
    _check_trainer(config)
    if launch.gpus_per_node:
        _check_gpus(config)


def _check_trainer(config: Config) -> None:
    nodes, backend = config.launch.trainer_nodes, config.trainer.backend
    if nodes == 1:
        return
    if backend in ("torch", "simulated"):
        allowed = (
            f'with trainer.backend "{backend}", which is one process, it must be 1; ddp, fsdp and deepspeed have more'
        )
        raise ConfigError("launch.trainer_nodes", nodes, allowed)
    check_ranks(config, nodes * config.trainer.nproc)


def _check_gpus(config: Config) -> None:
    gpus, nodes = config.launch.gpus_per_node, config.launch.rollout_nodes
    engines = most(config.rollout.workers, nodes)
    if (needed := engines * gpus_of_engine(config)) > gpus:
        allowed = f"{engines} engines a machine need {needed}: more launch.rollout_nodes, or fewer rollout.workers"
        raise ConfigError("launch.gpus_per_node", gpus, allowed)
    ranks = config.trainer.nproc if config.trainer.backend != "simulated" else 0
    judges = sum(workers_of(config, stage) for stage in model_stages(config, gpus))
    if ranks + judges > gpus:
        allowed = (
            f"the first trainer machine needs {ranks + judges}: trainer.nproc {ranks}, stages with a model {judges}"
        )
        raise ConfigError("launch.gpus_per_node", gpus, allowed)


def gpus_of_engine(config: Config) -> int:
    """GPUs of one engine."""
    match config.rollout.engine:
        case "simulated":
            return 0
        case "vllm":
            return config.rollout.vllm.tensor_parallel
        case "transformers":
            return 1


def model_stages(config: Config, gpus: int) -> tuple[str, ...]:
    """Stages that hold a model, where machines have GPUs for them."""
    return tuple(stage for stage in stages(config) if stage in MODEL_STAGES) if gpus else ()


def has_relay(relays: Relays, engines: int, machines: int) -> bool:
    """Whether a machine with so many engines, one of so many, takes weights once for all and passes them on."""
    return relays == "all" or (relays == "auto" and (engines > 1 or machines > ALONE))


def head_stages(config: Config, run_dir: Path, gpus: int) -> list[Role]:
    """Stage workers beside the servers. ``gpus``: of each of the other machines."""
    elsewhere = model_stages(config, gpus)
    wanted = [role for role in roles.workers(config, run_dir) if "--stage" in role.command]
    return [role for role in wanted if _stage_of(role) not in elsewhere]


def machine_cpus(config: Config, part: Part) -> int:
    """Processors of a machine of that part, when it is not given whole."""
    if part == "trainer":
        return config.trainer.nproc * config.trainer.threads
    engines = most(config.rollout.workers, config.launch.rollout_nodes)
    return engines * config.rollout.threads + has_relay(config.launch.relays, engines, config.launch.rollout_nodes)


def head_cpus(config: Config) -> int:
    """Processors of the head."""
    elsewhere = model_stages(config, config.launch.gpus_per_node)
    judges = sum(
        workers_of(config, name) * threads_of(config, name) for name in stages(config) if name not in elsewhere
    )
    return SERVER_CPUS * (2 + config.trajectories.shards) + judges


def machine_words(place: Place, connect: str, meet: str, number: str = "") -> list[str]:
    """What Python is told to run on a machine. ``number``: how a shell there knows which of its part it is."""
    words = ["-m", "staleflow.launch.machine", place.part, "--connect", connect]
    words += ["--machine", number or str(place.number), "--machines", str(place.machines)]
    words += ["--gpus", str(place.gpus)] if place.gpus else []
    if place.part == "rollout":
        words += ["--relays", place.relays] if place.relays != "auto" else []
        words += ["--mb-per-s", f"{place.mb_per_s:g}"] if place.mb_per_s else []
    return [*words, *(["--meet", meet] if place.part == "trainer" and place.machines > 1 else [])]


def rollout_roles(config: Config, folder: Path, connect: str, place: Place, relay_at: str) -> list[Role]:
    """Processes of a rollout machine. ``relay_at``: the address where a relay of this machine listens."""
    numbers = share(config.rollout.workers, place.number, place.machines)
    width = gpus_of_engine(config) if place.gpus else 0
    found = [
        replace(
            _attach(f"rollout-{number}", folder, connect, "rollout", threads=config.rollout.threads),
            gpus=tuple(range(local * width, (local + 1) * width)),
        )
        for local, number in enumerate(numbers)
    ]
    if has_relay(place.relays, len(numbers), place.machines):
        more = ("--mb-per-s", f"{place.mb_per_s:g}") if place.mb_per_s else ()
        found.insert(0, _attach(f"relay-{place.number}", folder, connect, "relay", "--bind", relay_at, *more))
    return found


def trainer_roles(config: Config, folder: Path, connect: str, place: Place, meet: str, here: str) -> list[Role]:
    """Processes of a trainer machine. ``meet``: ``host:port`` of the first one, where the ranks of all meet; ``here``:
    the address of this one."""
    nproc = config.trainer.nproc
    gpus = tuple(range(nproc)) if place.gpus and config.trainer.backend != "simulated" else ()
    trainer = _attach("trainer", folder, connect, "train", threads=config.trainer.threads)
    if place.machines > 1:
        trainer = _under_torchrun(trainer, config, place, meet, here)
    found = [replace(trainer, kind=Kind.TRAINER, gpus=gpus)]
    if place.number:
        return found
    judges = [
        _attach(f"{stage}-{number}", folder, connect, "stage", "--stage", stage, threads=threads_of(config, stage))
        for stage in model_stages(config, place.gpus)
        for number in range(workers_of(config, stage))
    ]
    return [*(replace(role, gpus=(len(gpus) + at,)) for at, role in enumerate(judges)), *found]


def names_on(config: Config, place: Place) -> list[str]:
    """Names of the processes of a machine, in the order in which they are started."""
    if place.part == "rollout":
        found = rollout_roles(config, Path(), "", place, relay_at="")
    else:
        found = trainer_roles(config, Path(), "", place, meet="", here="")
    return [role.name for role in found]


def _under_torchrun(trainer: Role, config: Config, place: Place, meet: str, here: str) -> Role:
    words = torchrun_words(config, place.machines, meet, here, hosts=str(place.number == 0).lower())
    command = (sys.executable, "-m", "staleflow.launch.ranks", *words, *trainer.command[1:])
    return replace(trainer, name=f"trainer-{place.number}" if place.number else "trainer", command=command)


def torchrun_words(config: Config, machines: int, meet: str, here: str, *, hosts: str) -> tuple[str, ...]:
    """Options of torchrun on one machine of several. When a rank dies, the ranks of all machines start anew.

    ``here``: address of this machine, for when rank 0 is on it. ``hosts``: ``true`` on the machine of ``meet``.
    """
    return (
        *(f"--nnodes={machines}", f"--nproc-per-node={config.trainer.nproc}", f"--local-addr={here}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={meet}", f"--rdzv-id={config.name}"),
        *(f"--rdzv-conf=is_host={hosts}", f"--max-restarts={RANK_RESTARTS}"),
    )


def _attach(name: str, folder: Path, connect: str, verb: str, *more: str, threads: int = 1) -> Role:
    command = (sys.executable, "-m", "staleflow.cli", "attach", verb, "--run-dir", str(folder), "--connect", connect)
    words = (*command, "--name", name, *more)
    return Role(name=name, kind=Kind.WORKER, command=words, threads=threads, works=Works.ATTACHED)


def _stage_of(role: Role) -> str:
    return role.command[role.command.index("--stage") + 1]
