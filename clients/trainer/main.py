"""The trainer process: reads its model, joins the run, trains until the last step or until it is asked to end."""

import asyncio
import logging
import threading
from pathlib import Path

from staleflow.clients.trainer.backend import Backend, Stopped
from staleflow.clients.trainer.checkpoint import Checkpoints
from staleflow.clients.trainer.client import Fenced, TrainerClient
from staleflow.clients.trainer.loop import GaveUp, TrainingLoop
from staleflow.configs.load import config_sha, model_dir
from staleflow.configs.schema import Config
from staleflow.runtime import daemon

log = logging.getLogger(__name__)


def attach(config: Config, run_dir: Path, name: str, scheduler: str) -> int:
    """Serve as the run's trainer; returns the exit code: 0 done or asked to end, 1 given up or fenced, 2 misconfigured.

    SIGTERM ends it with a checkpoint of the last whole step.
    """
    gave_up = False

    async def main(stop: daemon.Stop) -> None:
        nonlocal gave_up
        try:
            await _main(config, run_dir, name, scheduler, stop)
        except (GaveUp, Fenced) as error:
            log.error("%s", error)
            gave_up = True

    return daemon.run(main, name, run_dir) or int(gave_up)


async def _main(config: Config, run_dir: Path, name: str, scheduler: str, stop: daemon.Stop) -> None:
    """Signals arrive on this loop; training blocks, so it has a thread of its own."""
    stopping = threading.Event()
    client = TrainerClient(scheduler, name=name, config_sha=config_sha(config))

    async def pass_on() -> None:
        await stop.wait()
        stopping.set()
        client.interrupt()

    passing = asyncio.create_task(pass_on())
    try:
        await asyncio.to_thread(_train, config, run_dir, client, stopping)
    finally:
        passing.cancel()
        await asyncio.to_thread(client.close)


def _train(config: Config, run_dir: Path, client: TrainerClient, stopping: threading.Event) -> None:
    backend = make_backend(config, run_dir)
    try:
        client.attach()
        checkpoints = Checkpoints(run_dir / "checkpoints", run=client.run, keep=config.trainer.keep_checkpoints)
        loop = TrainingLoop(config, client=client, backend=backend, checkpoints=checkpoints, stop=stopping)
        loop.run()
    except Stopped:
        log.info("asked to end before there was anything to keep")
    finally:
        backend.close()


def make_backend(config: Config, run_dir: Path) -> Backend:
    """The configured backend. ``ConfigError`` when its model or its held-out prompts cannot be read."""
    match config.trainer.backend:
        case "simulated":
            from staleflow.clients.trainer.simulated_trainer import SimulatedTrainer

            return SimulatedTrainer(config.trainer.simulated_step_s)
        case "torch":
            from staleflow.clients.trainer.evaluation import open_evaluation
            from staleflow.clients.trainer.torch_trainer import TorchTrainer

            directory = model_dir(config, run_dir)
            return TorchTrainer(config, directory, open_evaluation(config, directory))
