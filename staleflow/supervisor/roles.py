"""Which processes a run has and how each is started. Pure."""

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from staleflow.configs.schema import Config


class Kind(StrEnum):
    """In the order in which they are drained."""

    WORKER = "worker"
    TRAINER = "trainer"
    SERVER = "server"
    SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process of the run."""

    name: str
    """Unique in the run; also the name of its log."""
    kind: Kind
    command: tuple[str, ...]
    threads: int = 1
    """Threads of its numeric libraries."""


def servers(config: Config, run_dir: Path) -> list[Role]:
    """The scheduler first."""
    shards = [
        _serve(f"trajectories-{shard}", Kind.SERVER, run_dir, "trajectories", "--shard", str(shard))
        for shard in range(config.trajectories.shards)
    ]
    return [
        _serve("scheduler", Kind.SCHEDULER, run_dir, "scheduler"),
        *shards,
        _serve("parameters", Kind.SERVER, run_dir, "parameters"),
    ]


def workers(config: Config, run_dir: Path) -> list[Role]:
    """The trainer last: everybody else can get ready while it loads."""
    rollout = [
        _attach(f"rollout-{number}", Kind.WORKER, run_dir, "rollout", config.rollout.threads)
        for number in range(config.rollout.workers)
    ]
    reward = [_attach(f"reward-{number}", Kind.WORKER, run_dir, "stage", 1) for number in range(config.reward.workers)]
    return [*rollout, *reward, _attach("trainer", Kind.TRAINER, run_dir, "train", config.trainer.threads)]


def model_builder(run_dir: Path) -> Role:
    """Makes the model directory and ends."""
    command = (sys.executable, "-m", "staleflow.supervisor.model", str(run_dir))
    return Role(name="model", kind=Kind.WORKER, command=command, threads=2)


def _serve(name: str, kind: Kind, run_dir: Path, *arguments: str) -> Role:
    command = (sys.executable, "-m", "staleflow.cli", "serve", *arguments, "--run-dir", str(run_dir))
    return Role(name=name, kind=kind, command=command)


def _attach(name: str, kind: Kind, run_dir: Path, verb: str, threads: int) -> Role:
    command = (sys.executable, "-m", "staleflow.cli", "attach", verb, "--run-dir", str(run_dir), "--name", name)
    return Role(name=name, kind=kind, command=command, threads=threads)
