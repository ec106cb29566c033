"""The processes of a run and the command that starts each of them. No IO."""

import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from staleflow.configs import pools
from staleflow.configs.own_settings import as_overrides
from staleflow.configs.placement import place
from staleflow.configs.schema import Config
from staleflow.configs.stages import stages, workers_of
from staleflow.configs.threads import Threads, share


class Kind(StrEnum):
    """Kind of process, in drain order."""

    WORKER = "worker"
    TRAINER = "trainer"
    SERVER = "server"
    SCHEDULER = "scheduler"


class WorkingSince(StrEnum):
    """Point in time from which the uptime of a process counts, for the restart policy."""

    STARTED = "started"
    ATTACHED = "attached"
    """Attached to the run: loading a model before that may take minutes."""
    MACHINE = "machine"
    """Its start, unless it exits with ``GAVE_UP`` because it stopped restarting its own children."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process of the run."""

    name: str
    """Unique in the run; also the name of its log."""
    kind: Kind
    command: tuple[str, ...]
    threads: int = 1
    """Thread count of its numeric libraries."""
    gpus: tuple[int, ...] = ()
    """Indices among the GPUs that this run may see; empty means all of them."""
    variables: tuple[tuple[str, str], ...] = ()
    """Additional environment variables as (name, value)."""
    works: WorkingSince = WorkingSince.STARTED
    elastic: bool = False
    """The scheduler decides whether it runs (``rollout.elastic``)."""
    spare: bool = False
    """It is not started with the run."""


PROGRESS_BARS = (("TQDM_POSITION", "-1"),)
"""Makes huggingface_hub print progress although its output is no terminal."""


def servers(config: Config, run_dir: Path, session: str = "") -> list[Role]:
    """Return the servers of a run, the scheduler first.

    ``session`` identifies this start of the run and lets the scheduler distinguish a resumed run from a restart of its
    own process.
    """
    named = ("--session", session) if session else ()
    shards = [
        _serve(f"trajectories-{shard}", Kind.SERVER, run_dir, "trajectories", "--shard", str(shard))
        for shard in range(config.trajectories.shards)
    ]
    return [
        _serve("scheduler", Kind.SCHEDULER, run_dir, "scheduler", *named),
        *shards,
        _serve("parameters", Kind.SERVER, run_dir, "parameters"),
    ]


def workers(config: Config, run_dir: Path, available: int = 0, cores: int = 1) -> list[Role]:
    """Return the workers of a run in start order, rollout workers first and the trainer last; with ``rollout.elastic``
    also the spare ones.

    ``available``: number of GPUs that the run may see; ``cores``: number of processors that it may use.
    """
    largest = pools.at_most(config)
    placement, threads = place(largest, available), share(largest, cores)
    rollout = [
        replace(rollout_worker(config, number, run_dir, threads=threads), gpus=gpus)
        for number, gpus in enumerate(placement.rollout)
    ]
    judges = [
        attach(
            f"{stage}-{number}", run_dir, "stage", "--stage", stage, threads=threads.of_stage(config, stage), gpus=gpus
        )
        for stage in stages(config)
        for number, gpus in enumerate(placement.stages.get(stage, [()] * workers_of(config, stage)))
    ]
    trainer = attach("trainer", run_dir, "train", threads=threads.of_trainer(config), gpus=placement.trainer)
    return [*rollout, *judges, replace(trainer, kind=Kind.TRAINER)]


def rollout_worker(config: Config, number: int, run_dir: Path, *more: str, threads: Threads | None = None) -> Role:
    """Return a rollout worker with the settings of its pool, on all GPUs. ``more``: further options."""
    worker = pools.workers(pools.at_most(config))[number]
    words = (*more, *as_overrides(worker, config))
    role = attach(f"rollout-{number}", run_dir, "rollout", *words, threads=(threads or Threads()).of_worker(worker))
    elastic, spare = config.rollout.elastic.max_workers > 0, number >= len(pools.workers(config))
    return replace(role, elastic=elastic, spare=spare)


def model_builder(run_dir: Path) -> Role:
    """Return the process that builds the model directory and exits."""
    command = (sys.executable, "-m", "staleflow.supervisor.model", str(run_dir))
    return Role(name="model", kind=Kind.WORKER, command=command, threads=2, variables=PROGRESS_BARS)


def _serve(name: str, kind: Kind, run_dir: Path, *arguments: str) -> Role:
    command = (sys.executable, "-m", "staleflow.cli", "serve", *arguments, "--run-dir", str(run_dir))
    return Role(name=name, kind=kind, command=command)


def attach(name: str, run_dir: Path, verb: str, *more: str, threads: int = 1, gpus: tuple[int, ...] = ()) -> Role:
    """Return a worker of a run. ``verb``: its role on the command line; ``more``: further options."""
    command = (sys.executable, "-m", "staleflow.cli", "attach", verb, "--run-dir", str(run_dir), "--name", name, *more)
    return Role(name=name, kind=Kind.WORKER, command=command, threads=threads, gpus=gpus, works=WorkingSince.ATTACHED)
