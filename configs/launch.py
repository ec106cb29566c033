"""The table of ``staleflow launch``: the machines of a run's processes, and the way to reach them."""

import math
from typing import Annotated, Literal

from msgspec import Meta, field

from staleflow.configs.section import NonNegative, NonNegativeFloat, Processes, Section, Text

Relays = Literal["auto", "all", "none"]


class Launch(Section, frozen=True, kw_only=True):
    """Machines for ``staleflow launch``. ``staleflow run`` ignores this table, and it is not part of the run: a resumed
    run may use other machines. Servers, and stages without a model, are on the launching machine (Slurm: on a node of
    their own, Kubernetes: in pods of their own).
    """

    rollout_nodes: Processes = 1
    """Number of rollout machines; ``rollout.workers`` engines are distributed over them."""
    relays: Relays = "auto"
    """Rollout machines that run a relay beside their engines, so that weights travel to the machine once. ``auto``:
    each with several engines, and all if there are more than four machines. ``all``, ``none``. A relay is supervised
    and restarted like an engine, and costs the disk space of ``parameters.keep_versions`` versions."""
    relay_mb_per_s: NonNegativeFloat = 0.0
    """Maximum download rate of each relay, in 10^6 bytes a second, for a slow shared link; 0: unlimited."""
    trainer_nodes: Processes = 1
    """Number of trainer machines, with ``trainer.nproc`` ranks on each."""
    rollout_price: NonNegativeFloat = 0.0
    """Price of a rollout machine for an hour, in any currency. ``staleflow simulate`` computes the cost of a step from
    it, shared by the engines of the machine. 0: no price."""
    trainer_price: NonNegativeFloat = 0.0
    """Price of a trainer machine for an hour; 0: no price."""
    gpus_per_node: NonNegative = 0
    """Number of GPUs of each of these machines, assigned from 0: to engines, or to ranks and then to stages with a
    model. 0: no GPU is requested, every process sees all GPUs, and stages with a model run beside the servers."""
    port: Annotated[int, Meta(ge=1024, le=65_000)] = 5551
    """First TCP port of the servers: scheduler, trajectory servers, parameter server, consecutively."""
    hosts: list[Text] = field(default_factory=list[Text])
    """ssh: names of the trainer's machines, followed by those of rollout."""
    shell: list[Text] = field(
        default_factory=lambda: ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5"]
    )
    """ssh: command that reaches a machine, called as ``SHELL... HOST COMMAND``."""
    setup: Text = ""
    """ssh, Slurm: shell command after which ``python`` is the one with staleflow, e.g. ``. /opt/venv/bin/activate``.
    Empty: use the Python path of the launching machine."""
    options: list[Text] = field(default_factory=list[Text])
    """Slurm: ``#SBATCH`` options of every component, e.g. ``--partition=gpu``."""
    image: Text = ""
    """Kubernetes: the container image; see the file ``Containerfile``."""
    volume: Text = ""
    """Kubernetes: a PersistentVolumeClaim with models and data, readable by many nodes, mounted at ``/data`` in every
    pod."""


def price(launch: Launch) -> float:
    """Return the price of all rollout and trainer machines for an hour; 0 without prices."""
    return launch.rollout_nodes * launch.rollout_price + launch.trainer_nodes * launch.trainer_price


def share(count: int, machine: int, machines: int) -> range:
    """Return the indices of the ``count`` items on a machine; the first machines have one more."""
    least, more = divmod(count, machines)
    first = machine * least + min(machine, more)
    return range(first, first + least + (machine < more))


def most(count: int, machines: int) -> int:
    """Return the largest number of items on one machine."""
    return math.ceil(count / machines)
