"""The table of ``staleflow launch``: on which machines the processes of a run are, and what reaches them."""

import math
from typing import Annotated, Literal

from msgspec import Meta, field

from staleflow.configs.section import NonNegative, NonNegativeFloat, Processes, Section, Text

Relays = Literal["auto", "all", "none"]


class Launch(Section, frozen=True, kw_only=True):
    """Machines for ``staleflow launch``; ``staleflow run`` looks at none of it, nor is it part of the run: one that is
    resumed may have other machines. Servers, and stages without a model, are on the machine that launches (Slurm: on a
    node of their own, Kubernetes: in pods of their own)."""

    rollout_nodes: Processes = 1
    """Machines of rollout; ``rollout.workers`` engines are spread over them."""
    relays: Relays = "auto"
    """Which machines of rollout have a relay beside their engines, by which weights come there once. ``auto``: each
    that has several engines, and all of more than four machines. ``all``, ``none``. A relay is watched and started
    again as engines are, and costs the disk ``parameters.keep_versions`` versions."""
    relay_mb_per_s: NonNegativeFloat = 0.0
    """The most that each of these relays asks for, in 10^6 bytes a second, where a slow link is shared; 0: no bound."""
    trainer_nodes: Processes = 1
    """Machines of the trainer, ``trainer.nproc`` ranks on each."""
    gpus_per_node: NonNegative = 0
    """GPUs of each of these machines, given out from 0: to engines; to ranks, then to stages with a model. 0: none are
    asked for, every process sees what there is, and stages with a model are beside the servers."""
    port: Annotated[int, Meta(ge=1024, le=65_000)] = 5551
    """First TCP port of the servers: scheduler, trajectory servers, parameter server, one after another."""
    hosts: list[Text] = field(default_factory=list[Text])
    """ssh: names of the trainer's machines, then of those of rollout."""
    shell: list[Text] = field(
        default_factory=lambda: ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5"]
    )
    """ssh: what reaches a machine, called as ``SHELL... HOST COMMAND``."""
    setup: Text = ""
    """ssh, Slurm: a shell command that makes ``python`` the one with staleflow, say ``. /opt/venv/bin/activate``.
    Empty: Python is where it is on the machine that launches."""
    options: list[Text] = field(default_factory=list[Text])
    """Slurm: ``#SBATCH`` options of every component, say ``--partition=gpu``."""
    image: Text = ""
    """Kubernetes: the container image; see the file ``Containerfile``."""
    volume: Text = ""
    """Kubernetes: a PersistentVolumeClaim with models and data, mounted at ``/data`` in every pod, read by many."""


def share(count: int, machine: int, machines: int) -> range:
    """Which of ``count`` things are on a machine, the first machines having one more."""
    least, more = divmod(count, machines)
    first = machine * least + min(machine, more)
    return range(first, first + least + (machine < more))


def most(count: int, machines: int) -> int:
    """Things on the machine that has most."""
    return math.ceil(count / machines)
