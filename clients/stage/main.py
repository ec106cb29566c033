"""The process of a stage worker: load the stage, attach to the run, work until stopped."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from staleflow.clients.attachment import attach as attach_to_run
from staleflow.clients.attachment import detach
from staleflow.clients.models.slim_import import hide_unused_packages
from staleflow.clients.stage.history import RunHistory
from staleflow.clients.stage.model_stage import Follower, FollowingStage, Judge, ModelStage
from staleflow.clients.stage.reward import reward_stage
from staleflow.clients.stage.user_stage import user_stage
from staleflow.clients.stage.worker import Stage, StageWorker
from staleflow.clients.texts import Decode, ids_as_text, tokenizer_decoder
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.hub import locate_model
from staleflow.configs.loading.load import config_sha, model_dir
from staleflow.configs.rules.checks import has_tokenizer
from staleflow.configs.schema import Config
from staleflow.configs.stages import graph, groups_at_once, stages
from staleflow.net.client import Client, worker_id
from staleflow.net.errors import Unavailable
from staleflow.net.permissions import Role
from staleflow.net.security import client_sockets
from staleflow.net.transport import Transport
from staleflow.process import daemon
from staleflow.protocols.wire.messages import Attach, Detach, GetStatus, SchedulerStatus
from staleflow.protocols.wire.stages import CRITIC, REFERENCE, REWARD

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0
"""Poll interval for the end of the run."""
SCHEDULER_TIMEOUT_S = 60.0
"""Silence of the scheduler after which the run is considered over."""


def attach(config: Config, run_dir: Path, name: str, scheduler: str, stage: str = REWARD) -> int:
    """Serve one stage; return the exit code. Unfinished groups go to another worker.

    Raise ``ConfigError`` if the run has no such stage.
    """
    if stage not in stages(config):
        raise ConfigError("stage", stage, f"this run has no such stage; it has {', '.join(stages(config))}")

    async def main(stop: daemon.Stop) -> None:
        transport = client_sockets(config.security, Role.STAGE)
        opened = _opened(config, run_dir, stage)
        await work_until(stop, config, name, scheduler, stage, opened=opened, transport=transport)

    return daemon.run(main, name, run_dir)


async def work_until(
    stop: daemon.Stop,
    config: Config,
    name: str,
    scheduler: str,
    stage: str,
    *,
    opened: AbstractAsyncContextManager[tuple[Stage, int]],
    transport: Transport,
) -> None:
    """Work until stopped or until the run is over.

    ``opened``: context of the stage and its maximum number of concurrent calls of user code.
    """
    working = asyncio.create_task(_work(config, name, scheduler, stage, opened, transport))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.wait((working,))
    if not working.cancelled():
        working.result()


async def _work(
    config: Config,
    name: str,
    address: str,
    stage: str,
    opened: AbstractAsyncContextManager[tuple[Stage, int]],
    transport: Transport,
) -> None:
    worker = worker_id(name)
    scheduler = Client(address, worker=worker, transport=transport)
    shards: list[Client] = []
    attached = False
    try:
        async with opened as entered:
            request = Attach(
                worker=worker, name=name, role="stage", stage=stage, config_sha=config_sha(config), pid=os.getpid()
            )
            answer = await attach_to_run(scheduler, request)
            attached = True
            shards += [Client(endpoint, worker=worker, transport=transport) for endpoint in answer.shards]
            instance, calls = entered
            groups = groups_at_once(config, stage, calls)
            working = StageWorker(worker=worker, name=stage, stage=instance, max_groups=groups, calls=calls)
            serving = asyncio.create_task(working.serve(shards))
            await while_it_lasts(scheduler, serving, _follow(instance))
    finally:
        if attached:
            await detach(scheduler, Detach(worker=worker, why="asked to end"))
        for client in (scheduler, *shards):
            client.close()


async def _ignore(_: SchedulerStatus) -> None:
    pass


def _follow(stage: Stage) -> Callable[[SchedulerStatus], Awaitable[None]]:
    """Return the function that a stage calls with each status of the run."""
    if not isinstance(stage, FollowingStage):
        return _ignore
    return lambda status: stage.follow(RunHistory.of(status))


async def while_it_lasts(
    scheduler: Client,
    serving: "asyncio.Task[None]",
    on_status: Callable[[SchedulerStatus], Awaitable[None]] = _ignore,
) -> None:
    """Cancel ``serving`` when the run is over; raise its error if it fails before."""
    try:
        while not serving.done():
            try:
                status = await scheduler.ask(GetStatus(), SchedulerStatus, timeout_s=SCHEDULER_TIMEOUT_S)
            except Unavailable:
                log.info("stage worker stops: no reply from the scheduler for %d s", SCHEDULER_TIMEOUT_S)
                return
            if status.finished:
                log.info("stage worker stops: the run is over")
                return
            await on_status(status)
            await asyncio.wait((serving,), timeout=POLL_INTERVAL_S)
        await serving
    finally:
        serving.cancel()
        await asyncio.wait((serving,))


@asynccontextmanager
async def _opened(config: Config, run_dir: Path, stage: str) -> AsyncGenerator[tuple[Stage, int]]:
    """Open a stage; yield it with its maximum number of concurrent calls of user code (0: none).

    All resources are released on exit. Raise ``ConfigError`` if the stage cannot start.
    """
    if stage == REWARD:
        async with reward_stage(config.reward, decoder(config, run_dir)) as reward:
            yield reward, reward.calls
        return
    if stage not in (REFERENCE, CRITIC):
        settings = next(settings for settings in config.stage if settings.name == stage)
        node = next(node for node in graph(config) if node.name == stage)
        async with user_stage(settings, node, decoder(config, run_dir)) as users:
            yield users, users.calls
        return
    model = (
        FollowingStage(lambda: open_critic(config, run_dir))
        if stage == CRITIC
        else ModelStage(lambda: open_judge(config, run_dir, stage))
    )
    try:
        await model.start()
        yield model, 0
    finally:
        await model.close()


def open_judge(config: Config, run_dir: Path, stage: str) -> Judge:
    """Load the model of a stage. Raise ``ConfigError`` if it cannot be loaded."""
    if stage == CRITIC:
        return open_critic(config, run_dir)
    hide_unused_packages()
    from staleflow.clients.stage.reference import Reference

    return Reference(
        _directory(config, run_dir, REFERENCE, config.reference.path),
        dtype=config.reference.dtype or config.model.dtype,
        temperature=config.rollout.temperature,
        micro_tokens=config.trainer.micro_tokens,
        threads=config.reference.threads,
        matmul_precision=config.model.matmul_precision,
    )


def open_critic(config: Config, run_dir: Path) -> Follower:
    """Load the critic's initial model, and lock its folder. Raise as ``open_judge``."""
    hide_unused_packages()
    from staleflow.clients.stage.critic import Critic

    return Critic(config, _directory(config, run_dir, CRITIC, config.critic.path), run_dir / "critic")


def _directory(config: Config, run_dir: Path, stage: str, own: str) -> Path:
    """Return the directory of a stage's model: its own, or the initial model of the run."""
    initial = model_dir(config, run_dir)
    if not own:
        return initial
    from staleflow.clients.tokens import check_same_tokens

    directory = locate_model(own, f"{stage}.path")
    check_same_tokens(f"{stage}.path", directory, initial)
    return directory


def decoder(config: Config, run_dir: Path) -> Decode:
    """Return the function that decodes this run's completions to text."""
    return tokenizer_decoder(model_dir(config, run_dir)) if has_tokenizer(config) else ids_as_text
