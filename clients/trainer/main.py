"""The trainer process: open the model, join the run, train until the last step or a stop request."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from staleflow.clients.models.slim_import import hide_unused_packages
from staleflow.clients.texts import tokenizer_decoder
from staleflow.clients.trainer.backends.base import Backend, OutOfMemory, Stopped, StreamingBackend
from staleflow.clients.trainer.checkpoint import Checkpoints
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.prefetch import NoBatch
from staleflow.clients.trainer.errors import BadVersion, Fenced
from staleflow.clients.trainer.loop import GaveUp, TrainingLoop
from staleflow.clients.trainer.ranks.follower import FollowerBatches
from staleflow.clients.trainer.ranks.leader import Leader, follow
from staleflow.clients.trainer.samples import FILE, Samples
from staleflow.clients.trainer.steps import Steps, StreamedSteps, WholeSteps
from staleflow.configs.imports import load_object
from staleflow.configs.loading.load import config_sha, model_dir
from staleflow.configs.ranks import LISTEN_FD, place
from staleflow.configs.schema import Config
from staleflow.net.permissions import Role
from staleflow.net.security import client_sockets
from staleflow.process import daemon
from staleflow.trace import run_history

if TYPE_CHECKING:
    from staleflow.clients.trainer.backends.collectives import ManyRanks, OneRank
    from staleflow.clients.trainer.torch_trainer import TorchTrainer

log = logging.getLogger(__name__)

ENDS = (GaveUp, Fenced, BadVersion, NoBatch, OutOfMemory)
"""Errors that end a trainer with exit code 1; the log names the reason."""

InThread = Callable[[Callable[[], None]], Awaitable[None]]
"""Run a blocking function."""


def attach(config: Config, run_dir: Path, name: str, scheduler: str) -> int:
    """Run the trainer; return the exit code: 0 finished or stopped, 1 failed (see the log), 2 misconfigured.

    SIGTERM ends it with a checkpoint of the last complete step. A process that a launcher started as one of several
    ranks runs as that rank.
    """
    if config.trainer.run:
        return own_trainer(config.trainer.run, run_dir)
    where, gave_up = place(), False
    name = name if where.leads else f"{name}-rank-{where.rank}"

    async def main(stop: daemon.Stop) -> None:
        nonlocal gave_up
        try:
            await _main(config, run_dir, name, scheduler, stop)
        except ENDS as error:
            log.error("%s", error)
            gave_up = True

    return daemon.run(main, name, run_dir) or int(gave_up)


def own_trainer(spec: str, run_dir: Path) -> int:
    """Call the user's function in place of the built-in trainer; an exception ends the process.

    SIGTERM raises ``SystemExit`` in it, so that its ``finally`` clauses run.
    """
    if inherited := os.environ.pop(LISTEN_FD, ""):
        os.close(int(inherited))  # the function's torch.distributed listens at this port itself
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    load_object(spec, "trainer.run")(run_dir)
    return 0


async def _main(config: Config, run_dir: Path, name: str, scheduler: str, stop: daemon.Stop) -> None:
    where = place()
    client = TrainerClient(
        scheduler,
        name=name,
        config_sha=config_sha(config),
        rank=where.rank,
        world=where.world,
        transport=client_sockets(config.security, Role.TRAINER),
        direct=direct_bind(config),
    )
    work = _train if where.leads else _follow
    await work_until(stop, client, lambda stopping: work(config, run_dir, client, stopping), asyncio.to_thread)


async def work_until(
    stop: daemon.Stop, client: TrainerClient, work: Callable[[threading.Event], None], in_thread: InThread
) -> None:
    """Run ``work`` in a thread, because training blocks and signals arrive on this loop."""
    stopping = threading.Event()

    async def pass_on() -> None:
        await stop.wait()
        stopping.set()
        client.interrupt()

    passing = asyncio.create_task(pass_on())
    try:
        await in_thread(lambda: work(stopping))
    finally:
        passing.cancel()
        await in_thread(client.close)


def direct_bind(config: Config) -> str:
    """Return the address where this process serves versions to engines itself; empty if disabled."""
    parameters = config.parameters
    return (parameters.direct_bind or "tcp://127.0.0.1:*") if parameters.transport == "direct" else ""


def _train(config: Config, run_dir: Path, client: TrainerClient, stopping: threading.Event) -> None:
    train(config, run_dir, client, _open(config, run_dir, client), stopping)


def train(config: Config, run_dir: Path, client: TrainerClient, backend: Backend, stopping: threading.Event) -> None:
    """Attach, then train until the last step or until ``stopping``. Closes the backend."""
    try:
        histories = [
            *run_history.of_checkpoints(run_dir)
        ]  # read before attaching: an older trainer may still save more
        attached = client.attach()
        for path, history in histories:
            run_history.check(history, attached, path)
        checkpoints = Checkpoints(
            run_dir / run_history.CHECKPOINTS, run=client.run, keep=config.trainer.keep_checkpoints
        )
        loop = TrainingLoop(
            config,
            client=client,
            backend=backend,
            steps=_steps(config, backend),
            checkpoints=checkpoints,
            stop=stopping,
            samples=_samples(config, run_dir),
        )
        loop.run()
    except Stopped:
        log.info("stopped on request before there was anything to save")
    finally:
        backend.close()


def _steps(config: Config, backend: Backend) -> Steps:
    if not config.trainer.streaming:
        return WholeSteps(backend)
    assert isinstance(backend, StreamingBackend)
    return StreamedSteps(backend, config.trainer.stream_groups)


def _samples(config: Config, run_dir: Path) -> Samples | None:
    """Return the writer of training samples; None without a model, whose tokens are random."""
    if config.trainer.backend == "simulated":
        return None
    return Samples(run_dir / FILE, tokenizer_decoder(model_dir(config, run_dir), special=True))


def _open(config: Config, run_dir: Path, client: TrainerClient) -> Backend:
    """Return the loop's backend: the configured one, or one that leads all ranks."""
    if config.trainer.backend == "simulated":
        from staleflow.clients.trainer.backends.simulated import SimulatedTrainer

        return SimulatedTrainer(config.trainer.simulated_step_s, config.trainer.batch_size)
    from staleflow.clients.trainer.backends.collectives import OneRank, open_ranks

    ranks = open_ranks(config.trainer.backend)
    backend = _torch_backend(config, run_dir, ranks)
    client.model = backend.limits
    if isinstance(ranks, OneRank):
        return backend
    leader = Leader(backend, ranks, lambda: client.current_term)
    client.same, client.share = leader.same, leader.share
    return leader


def _follow(config: Config, run_dir: Path, client: TrainerClient, stopping: threading.Event) -> None:
    """Run a rank above 0: its own backend and its own batches, directed by rank 0's orders."""
    from staleflow.clients.trainer.backends.collectives import ManyRanks, open_ranks

    ranks = open_ranks(config.trainer.backend)
    assert isinstance(ranks, ManyRanks)
    backend = _torch_backend(config, run_dir, ranks)
    client.model = backend.limits
    client.attach()
    batches = FollowerBatches(client, config.trainer.steps, streaming=config.trainer.streaming)
    follow(backend, ranks, batches, stopping.is_set, client.write_spans)


def _torch_backend(config: Config, run_dir: Path, ranks: "OneRank | ManyRanks") -> "TorchTrainer":
    """Open the backend. ``ConfigError`` if the model or held-out prompts are unreadable or a package is missing."""
    hide_unused_packages()
    from staleflow.clients.trainer.evaluation.factory import open_evaluation
    from staleflow.clients.trainer.torch_trainer import TorchTrainer

    directory = model_dir(config, run_dir)
    return TorchTrainer(config, directory, open_evaluation(config, directory), ranks)
