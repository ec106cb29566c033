"""The reward worker process: starts the reward's child, joins the run, scores groups until it is asked to end."""

import asyncio
import logging
import os
from pathlib import Path

from staleflow.clients.attachment import attach as attach_to_run
from staleflow.clients.stage.runner import RewardRunner
from staleflow.clients.stage.texts import Decode, ids_as_text, tokenizer_decoder
from staleflow.clients.stage.worker import RewardWorker
from staleflow.configs.load import config_sha, model_dir
from staleflow.configs.schema import Config
from staleflow.protocols.wire.messages import Attach, Detach, Done
from staleflow.runtime import daemon
from staleflow.runtime.client import Client, worker_id
from staleflow.runtime.errors import Refused, Unavailable

log = logging.getLogger(__name__)

FAREWELL_S = 1.0


def attach(config: Config, run_dir: Path, name: str, scheduler: str) -> int:
    """Serve the reward stage; returns the exit code. What a worker leaves unscored goes to another one."""

    async def main(stop: daemon.Stop) -> None:
        await _main(config, run_dir, name, scheduler, stop)

    return daemon.run(main, name, run_dir)


async def _main(config: Config, run_dir: Path, name: str, address: str, stop: daemon.Stop) -> None:
    working = asyncio.create_task(_work(config, run_dir, name, address))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.wait((working,))
    if not working.cancelled():
        working.result()


async def _work(config: Config, run_dir: Path, name: str, address: str) -> None:
    worker = worker_id(name)
    decode = decoder(config, run_dir)
    runner = RewardRunner(config.reward.run, timeout_s=config.reward.timeout_s, retries=config.reward.retries)
    scheduler = Client(address, worker=worker)
    shards: list[Client] = []
    attached = False
    try:
        await runner.start()
        request = Attach(worker=worker, name=name, role="stage", config_sha=config_sha(config), pid=os.getpid())
        answer = await attach_to_run(scheduler, request)
        attached = True
        shards += [Client(endpoint, worker=worker) for endpoint in answer.shards]
        rewards = RewardWorker(worker=worker, runner=runner, decode=decode, max_groups=config.reward.batch)
        await rewards.serve(shards)
    finally:
        await runner.close()
        if attached:
            await _say_goodbye(scheduler, Detach(worker=worker, why="asked to end"))
        for client in (scheduler, *shards):
            client.close()


async def _say_goodbye(scheduler: Client, detach: Detach) -> None:
    try:
        await scheduler.ask(detach, Done, timeout_s=FAREWELL_S)
    except (Refused, Unavailable) as error:
        log.info("the scheduler did not hear the farewell: %s", error)


def decoder(config: Config, run_dir: Path) -> Decode:
    """How this run's completions become text."""
    return ids_as_text if config.rollout.engine == "simulated" else tokenizer_decoder(model_dir(config, run_dir))
