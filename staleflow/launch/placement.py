"""Assign the processes of a run to machines. No IO.

- **Head**: the servers and the stages without a model; all stages if ``launch.gpus_per_node`` is 0.
- **Rollout machines**: ``rollout.workers`` engines, spread evenly; with ``rollout.elastic`` its maximum, of which only
  the wanted ones run. Depending on ``launch.relays``, a relay beside them downloads the weights once per machine. With
  many machines each one has a relay, and the relays form a tree.
- **Trainer machines**: ``trainer.nproc`` ranks on each. The first one also has the stages with a model, on its
  remaining GPUs.

A machine receives its part, its number and the scheduler's address, and derives the rest from the run's configuration.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from staleflow.configs.errors import ConfigError
from staleflow.configs.launch import Relays, most, share
from staleflow.configs.pools import at_most, gpus_of_engine, pools
from staleflow.configs.pools import workers as workers_at_start
from staleflow.configs.rules.checks import check_ranks
from staleflow.configs.schema import Config
from staleflow.configs.stages import stages, workers_of
from staleflow.configs.threads import Threads
from staleflow.protocols.wire.stages import CRITIC, REFERENCE
from staleflow.supervisor import roles
from staleflow.supervisor.roles import Kind, Role

Part = Literal["rollout", "trainer"]
PARTS: tuple[Part, ...] = get_args(Part)
MODEL_STAGES = (REFERENCE, CRITIC)
SERVER_CPUS = 2
UNSHARED = Threads()
"""Threads of processes that have to choose: one each, since a machine of the run does not know the others on it."""
"""Processors reserved per server; a scheduler uses one, a trajectory server up to two."""


MAX_RANK_RESTARTS = 10
"""Number of times that torchrun restarts all ranks; after that, the machine's own restart policy applies."""
MAX_WITHOUT_TREE = 4
"""Maximum number of rollout machines that pull directly from the parameter server; more of them form a relay tree."""
RENDEZVOUS_PORT_OFFSET = 100
"""Port of the rendezvous of ranks on several machines, relative to ``launch.port``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One machine among those of its part."""

    part: Part
    number: int
    machines: int
    gpus: int
    """GPUs that it may use; 0 means all, without a request to the batch system."""
    relays: Relays = "auto"
    """``launch.relays``."""
    mb_per_s: float = 0.0
    """``launch.relay_mb_per_s``."""

    @property
    def name(self) -> str:
        """Unique in the run; also the name of its log."""
        return f"{self.part}-machine-{self.number}"


def places(config: Config) -> list[Place]:
    """Return every machine except the head: the trainer's first, then those of rollout."""
    launch = config.launch
    counts: dict[Part, int] = {"trainer": launch.trainer_nodes, "rollout": launch.rollout_nodes}
    return [place_of(config, part, count, number) for part, count in counts.items() for number in range(count)]


def place_of(config: Config, part: Part, machines: int, number: int = 0) -> Place:
    """Return one machine of ``config.launch``."""
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
    """Raise ``ConfigError`` if the run cannot be placed on the machines of ``config.launch``."""
    launch, engines = config.launch, len(workers(config))
    if launch.rollout_nodes > engines:
        allowed = f"it must be at most rollout.workers, {engines}: each machine needs at least one engine"
        raise ConfigError("launch.rollout_nodes", launch.rollout_nodes, allowed)
    named = [("rollout.gpus", config.rollout.gpus), ("trainer.gpus", config.trainer.gpus)]
    for key, gpus in [*named, *((f"{pool.key}.gpus", pool.config.rollout.gpus) for pool in pools(config))]:
        if gpus:
            raise ConfigError(key, gpus, "launch.gpus_per_node assigns the GPUs of launched machines: leave it empty")
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
    engines = max((engines_on(config, number, nodes) for number in range(nodes)), key=_gpus_of)
    if (needed := _gpus_of(engines)) > gpus:
        allowed = f"{len(engines)} engines a machine need {needed}: more launch.rollout_nodes, or fewer rollout.workers"
        raise ConfigError("launch.gpus_per_node", gpus, allowed)
    ranks = config.trainer.nproc if config.trainer.backend != "simulated" else 0
    judges = sum(workers_of(config, stage) for stage in model_stages(config, gpus))
    if ranks + judges > gpus:
        allowed = (
            f"the first trainer machine needs {ranks + judges}: trainer.nproc {ranks}, stages with a model {judges}"
        )
        raise ConfigError("launch.gpus_per_node", gpus, allowed)


def workers(config: Config) -> list[Config]:
    """Return the configuration of each rollout worker that may run, in the order of their numbers."""
    return workers_at_start(at_most(config))


def engines_on(config: Config, machine: int, machines: int) -> dict[int, Config]:
    """Return the configurations of the rollout workers on a machine, by their numbers."""
    each = workers(config)
    return {number: each[number] for number in share(len(each), machine, machines)}


def _gpus_of(engines: dict[int, Config]) -> int:
    return sum(gpus_of_engine(engine) for engine in engines.values())


def model_stages(config: Config, gpus: int) -> tuple[str, ...]:
    """Return the stages that need a model and a GPU; none if ``gpus`` is 0."""
    return tuple(stage for stage in stages(config) if stage in MODEL_STAGES) if gpus else ()


def has_relay(relays: Relays, engines: int, machines: int) -> bool:
    """Return whether a machine with ``engines`` engines, one of ``machines``, has a relay."""
    return relays == "all" or (relays == "auto" and (engines > 1 or machines > MAX_WITHOUT_TREE))


def head_stages(config: Config, run_dir: Path, gpus: int) -> list[Role]:
    """Return the stage workers that run beside the servers. ``gpus``: GPUs of each other machine."""
    elsewhere = model_stages(config, gpus)
    wanted = [role for role in roles.workers(config, run_dir) if "--stage" in role.command]
    return [role for role in wanted if _stage_of(role) not in elsewhere]


def machine_cpus(config: Config, part: Part) -> int:
    """Return the processors to request for a machine of ``part`` if machines are not allocated exclusively."""
    if part == "trainer":
        return config.trainer.nproc * UNSHARED.of_trainer(config)
    nodes = config.launch.rollout_nodes
    machines = [engines_on(config, number, nodes).values() for number in range(nodes)]
    threads = max(sum(map(UNSHARED.of_worker, engines)) for engines in machines)
    return threads + has_relay(config.launch.relays, most(len(workers(config)), nodes), nodes)


def head_cpus(config: Config) -> int:
    """Return the number of processors that the head needs."""
    elsewhere = model_stages(config, config.launch.gpus_per_node)
    judges = sum(
        workers_of(config, name) * UNSHARED.of_stage(config, name) for name in stages(config) if name not in elsewhere
    )
    return SERVER_CPUS * (2 + config.trajectories.shards) + judges


def machine_words(place: Place, connect: str, meet: str, number: str = "") -> list[str]:
    """Return Python's arguments on a machine. ``number``: shell expression for the machine's number in its part."""
    words = ["-m", "staleflow.launch.machine", place.part, "--connect", connect]
    words += ["--machine", number or str(place.number), "--machines", str(place.machines)]
    words += ["--gpus", str(place.gpus)] if place.gpus else []
    if place.part == "rollout":
        words += ["--relays", place.relays] if place.relays != "auto" else []
        words += ["--mb-per-s", f"{place.mb_per_s:g}"] if place.mb_per_s else []
    return [*words, *(["--meet", meet] if place.part == "trainer" and place.machines > 1 else [])]


def rollout_roles(config: Config, folder: Path, connect: str, place: Place, relay_at: str) -> list[Role]:
    """Return the processes of a rollout machine. ``relay_at``: address that a relay on this machine binds."""
    placed, used = list[Role](), 0
    for number, engine in engines_on(config, place.number, place.machines).items():
        width = gpus_of_engine(engine) if place.gpus else 0
        role = roles.rollout_worker(config, number, folder, "--connect", connect)
        placed.append(replace(role, gpus=tuple(range(used, used + width))))
        used += width
    if has_relay(place.relays, len(placed), place.machines):
        more = ("--mb-per-s", f"{place.mb_per_s:g}") if place.mb_per_s else ()
        words = ("--connect", connect, "--bind", relay_at, *more)
        placed.insert(0, roles.attach(f"relay-{place.number}", folder, "relay", *words))
    return placed


def trainer_roles(config: Config, folder: Path, connect: str, place: Place, meet: str, here: str) -> list[Role]:
    """Return the processes of a trainer machine.

    ``meet``: ``host:port`` of the rendezvous of all ranks, on the first machine. ``here``: address of this machine.
    """
    nproc = config.trainer.nproc
    gpus = tuple(range(nproc)) if place.gpus and config.trainer.backend != "simulated" else ()
    reach = ("--connect", connect)
    trainer = roles.attach("trainer", folder, "train", *reach, threads=UNSHARED.of_trainer(config))
    if place.machines > 1:
        trainer = _under_torchrun(trainer, config, place, meet, here)
    placed = [replace(trainer, kind=Kind.TRAINER, gpus=gpus)]
    if place.number:
        return placed
    judges = [
        roles.attach(
            f"{stage}-{number}", folder, "stage", *reach, "--stage", stage, threads=UNSHARED.of_stage(config, stage)
        )
        for stage in model_stages(config, place.gpus)
        for number in range(workers_of(config, stage))
    ]
    return [*(replace(role, gpus=(len(gpus) + at,)) for at, role in enumerate(judges)), *placed]


def names_on(config: Config, place: Place) -> list[str]:
    """Return the names of the processes of a machine in start order."""
    if place.part == "rollout":
        placed = rollout_roles(config, Path(), "", place, relay_at="")
    else:
        placed = trainer_roles(config, Path(), "", place, meet="", here="")
    return [role.name for role in placed]


def _under_torchrun(trainer: Role, config: Config, place: Place, meet: str, here: str) -> Role:
    words = torchrun_words(config, place.machines, meet, here, hosts=str(place.number == 0).lower())
    command = (sys.executable, "-m", "staleflow.launch.ranks", *words, *trainer.command[1:])
    return replace(trainer, name=f"trainer-{place.number}" if place.number else "trainer", command=command)


def torchrun_words(config: Config, machines: int, meet: str, here: str, *, hosts: str) -> tuple[str, ...]:
    """Return the options of torchrun on one machine of several. When a rank dies, torchrun restarts all ranks.

    ``here``: address of this machine, used if it has rank 0. ``hosts``: ``true`` on the machine that hosts ``meet``.
    """
    return (
        *(f"--nnodes={machines}", f"--nproc-per-node={config.trainer.nproc}", f"--local-addr={here}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={meet}", f"--rdzv-id={config.name}"),
        *(f"--rdzv-conf=is_host={hosts}", f"--max-restarts={MAX_RANK_RESTARTS}"),
    )


def _stage_of(role: Role) -> str:
    return role.command[role.command.index("--stage") + 1]
