"""Which processes a run has and how each is started. Pure."""

import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from staleflow.configs.schema import Config
from staleflow.configs.stages import stages, threads_of, workers_of


class Kind(StrEnum):
    """In the order in which they are drained."""

    WORKER = "worker"
    TRAINER = "trainer"
    SERVER = "server"
    SCHEDULER = "scheduler"


class Works(StrEnum):
    """From when on a process works, and what it did before does not speak for it."""

    STARTED = "started"
    ATTACHED = "attached"
    """To the run: it may have loaded for minutes."""
    MACHINE = "machine"
    """From its start, unless it gave up what it looks after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process of the run."""

    name: str
    """Unique in the run; also the name of its log."""
    kind: Kind
    command: tuple[str, ...]
    threads: int = 1
    """Threads of its numeric libraries."""
    gpus: tuple[int, ...] = ()
    """Of those that this run may see; empty: all of them."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of its own, with their values."""
    works: Works = Works.STARTED


BARS = (("TQDM_POSITION", "-1"),)
"""Without it huggingface_hub shows no progress where nobody looks at a terminal."""


def servers(config: Config, run_dir: Path, session: str = "") -> list[Role]:
    """The scheduler first. ``session``: names this start of the run, so that the scheduler can tell a resumption from a
    restart."""
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


def workers(config: Config, run_dir: Path) -> list[Role]:
    """The trainer last: everybody else can get ready while it loads."""
    rollout = [
        _on(
            _attach(f"rollout-{number}", Kind.WORKER, run_dir, "rollout", config.rollout.threads),
            _share(config, number),
        )
        for number in range(config.rollout.workers)
    ]
    trainer = _attach("trainer", Kind.TRAINER, run_dir, "train", config.trainer.threads)
    judges = [
        _stage(f"{stage}-{number}", run_dir, stage, threads_of(config, stage))
        for stage in stages(config)
        for number in range(workers_of(config, stage))
    ]
    return [*rollout, *judges, _on(trainer, tuple(config.trainer.gpus))]


def _share(config: Config, number: int) -> tuple[int, ...]:
    """The GPUs of a rollout worker: one, or as many as its engine needs, going round."""
    gpus, rollout = config.rollout.gpus, config.rollout
    width = rollout.vllm.tensor_parallel if rollout.engine == "vllm" else 1
    return tuple(gpus[(number * width + place) % len(gpus)] for place in range(width)) if gpus else ()


def _on(role: Role, gpus: tuple[int, ...]) -> Role:
    return replace(role, gpus=gpus)


def model_builder(run_dir: Path) -> Role:
    """Makes the model directory and ends."""
    command = (sys.executable, "-m", "staleflow.supervisor.model", str(run_dir))
    return Role(name="model", kind=Kind.WORKER, command=command, threads=2, variables=BARS)


def _serve(name: str, kind: Kind, run_dir: Path, *arguments: str) -> Role:
    command = (sys.executable, "-m", "staleflow.cli", "serve", *arguments, "--run-dir", str(run_dir))
    return Role(name=name, kind=kind, command=command)


def _attach(name: str, kind: Kind, run_dir: Path, verb: str, threads: int) -> Role:
    command = (sys.executable, "-m", "staleflow.cli", "attach", verb, "--run-dir", str(run_dir), "--name", name)
    return Role(name=name, kind=kind, command=command, threads=threads, works=Works.ATTACHED)


def _stage(name: str, run_dir: Path, stage: str, threads: int) -> Role:
    role = _attach(name, Kind.WORKER, run_dir, "stage", threads)
    return replace(role, command=(*role.command, "--stage", stage))
