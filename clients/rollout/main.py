"""``staleflow attach rollout``: one engine, attached to a run until the run drains or a signal ends it."""

import asyncio
import inspect
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.attachment import attach as attach_to
from staleflow.clients.evaluation.evaluator import Evaluator
from staleflow.clients.models.slim_import import hide_unused_packages
from staleflow.clients.prompts import Conversation, Encode
from staleflow.clients.rollout.engines.base import AsyncEngine
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.rollout.episodes.chat.template import ByteChatTemplate
from staleflow.clients.rollout.episodes.environment import Environments
from staleflow.clients.rollout.groups import Recipe
from staleflow.clients.rollout.worker import Worker
from staleflow.clients.stage.main import decoder
from staleflow.clients.weights import Puller
from staleflow.clients.weights.mirror import mirror_url
from staleflow.configs.engines import KEY, check_methods, is_stepped
from staleflow.configs.imports import load_object
from staleflow.configs.loading.load import config_sha, model_dir
from staleflow.configs.loading.prompt_rows import open_eval_set
from staleflow.configs.rules.checks import has_tokenizer, needs_model
from staleflow.configs.schema import Config
from staleflow.net.client import Client, worker_id
from staleflow.net.permissions import Role
from staleflow.net.security import client_sockets
from staleflow.net.transport import Transport
from staleflow.process.daemon import Stop, run
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Attach

log = logging.getLogger(__name__)

OpenEngine = Callable[[Config, Path], Awaitable[tuple[AsyncEngine, Encode]]]
"""Return an engine and the function that converts prompts to its token ids."""


SUPERVISED_HANDOVER_S = 3.0
"""Maximum time to hand groups over under a supervisor, which kills a worker 5.5 s after its SIGTERM."""


def attach(config: Config, run_dir: Path, name: str, scheduler: str, *, supervised: bool = False) -> int:
    """Run one rollout worker and return its exit code. ``supervised``: it stops within the time of its supervisor."""
    handover_s = config.rollout.handover_s
    if supervised:
        handover_s = min(handover_s, SUPERVISED_HANDOVER_S)

    async def main(stop: Stop) -> None:
        transport = client_sockets(config.security, Role.ROLLOUT)
        await work_until(
            stop, config, run_dir, name, scheduler, opened=open_engine, transport=transport, handover_s=handover_s
        )

    return run(main, name, run_dir)


async def work_until(
    stop: Stop,
    config: Config,
    run_dir: Path,
    name: str,
    scheduler: str,
    *,
    opened: OpenEngine,
    transport: Transport,
    handover_s: float = 0.0,
) -> None:
    """Work until stopped or until the run has drained. ``opened`` creates the engine inside the running loop.

    ``handover_s``: maximum time to hand unfinished groups over to other workers, once stopped.
    """
    stopped = asyncio.ensure_future(stop.wait())
    serving: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
    work = asyncio.ensure_future(_work(stop, config, run_dir, name, scheduler, opened, transport, serving))
    await asyncio.wait((stopped, work), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if handover_s and serving.done() and not work.done():
        handover = asyncio.ensure_future(serving.result().hand_over(handover_s))
        await asyncio.wait((handover, work), return_when=asyncio.FIRST_COMPLETED)
        handover.cancel()
    if not work.done():
        work.cancel()
    try:
        await work
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


async def _work(
    stop: Stop,
    config: Config,
    run_dir: Path,
    name: str,
    scheduler: str,
    opened: OpenEngine,
    transport: Transport,
    serving: "asyncio.Future[Worker]",
) -> None:
    """Work until the run has drained. ``serving`` receives the worker once it is attached."""
    engine, encode = await opened(config, run_dir)
    me, recipe = worker_id(name), Recipe.of(config)
    to_scheduler = Client(scheduler, worker=me, transport=transport)
    closing: list[Client | Puller] = [to_scheduler]
    environments = open_environments(config, run_dir, engine, recipe)
    try:
        if environments is not None:
            await environments.start()
        evaluator = open_evaluator(config, run_dir, me, to_scheduler, engine, encode, environments)
        hello = Attach(
            worker=me,
            name=name,
            role="rollout",
            config_sha=config_sha(config),
            capacity=recipe.capacity(config.rollout.max_inflight),
            pid=os.getpid(),
            eval_prompts=[] if evaluator is None else evaluator.num_prompts,
        )
        attached = await attach_to(to_scheduler, hello, parameters=True)
        log.info(
            "attached to run %s as %s, %s engine, %d groups", attached.run, me, config.rollout.engine, hello.capacity
        )
        shards = [Client(address, worker=me, transport=transport) for address in attached.shards]
        deltas = config.parameters.delta != "off"
        direct = config.parameters.transport == "direct"
        puller = Puller(
            attached.parameters,
            worker=me,
            transport=transport,
            deltas=deltas,
            direct=direct,
            mirror=mirror_url(config, attached.run),
        )
        closing += [*shards, puller]
        worker = Worker(me, to_scheduler, shards, puller, engine, encode, recipe, environments, evaluator=evaluator)
        serving.set_result(worker)
        why = "failed"
        try:
            await worker.run()
            why = "drained"
        finally:
            await worker.leave(stop.why or why)
    finally:
        if environments is not None:
            await environments.close()
        await engine.close()
        for connection in closing:
            connection.close()


async def open_engine(config: Config, run_dir: Path) -> tuple[AsyncEngine, Encode]:
    """Return the configured engine and its prompt encoder. ``ConfigError`` if the model cannot be read."""
    rollout = config.rollout
    drain = rollout.on_update == "drain"
    match rollout.engine:
        case "simulated":
            simulated = SimulatedEngine(rollout.simulated, slots=rollout.max_inflight, seed=config.seed)
            return EngineThread(simulated, drain=drain), text_bytes
        case "transformers":
            hide_unused_packages()
            from staleflow.clients.rollout.engines.transformers.model import open_transformers

            stepped, encode = await asyncio.to_thread(open_transformers, config, model_dir(config, run_dir))
            return EngineThread(stepped, drain=drain), encode
        case "vllm":
            from staleflow.clients.rollout.engines.vllm.model import open_vllm

            return await open_vllm(config, model_dir(config, run_dir))
        case "vllm_server":
            from staleflow.clients.rollout.engines.vllm.model import open_vllm_server

            return await open_vllm_server(config, model_dir(config, run_dir))
        case _:
            return await open_user_engine(config, model_dir(config, run_dir))


async def open_user_engine(config: Config, directory: Path) -> tuple[AsyncEngine, Encode]:
    """Return the engine of the user's class and its prompt encoder. ``ConfigError`` if it is no engine.

    The class is called inside the running event loop, so that it can create its ``failure`` there. Prompts are encoded
    by its ``encode``, if it has one, else by the tokenizer of the model.
    """
    spec, options = config.rollout.engine, config.rollout.engine_options
    made: Any = load_object(spec, KEY)(directory, config, **options)
    engine = await made if inspect.isawaitable(made) else made
    check_methods(engine, spec)
    if is_stepped(engine):
        runner: AsyncEngine = EngineThread(engine, drain=config.rollout.on_update == "drain")
    else:
        runner = engine
    if hasattr(engine, "encode"):
        return runner, engine.encode
    if not needs_model(config):
        return runner, text_bytes
    from staleflow.clients.tokens import encoder, open_tokenizer

    return runner, encoder(open_tokenizer(directory), chat_template=config.prompts.chat_template)


def open_environments(config: Config, run_dir: Path, engine: AsyncEngine, recipe: Recipe) -> Environments | None:
    """Return the run's environments, not yet started; None for plain prompts."""
    if not config.environment.run:
        return None
    if not has_tokenizer(config):
        return Environments(config, engine, ByteChatTemplate(), recipe)
    from staleflow.clients.rollout.episodes.chat.tokenizer import open_chat_template

    return Environments(config, engine, open_chat_template(model_dir(config, run_dir)), recipe)


def open_evaluator(
    config: Config,
    run_dir: Path,
    me: WorkerId,
    scheduler: Client,
    engine: AsyncEngine,
    encode: Encode,
    environments: Environments | None,
) -> Evaluator | None:
    """Return the player of the run's evaluation sets; None if it has none. ``ConfigError`` if a source cannot be
    read."""
    if not config.eval:
        return None
    rows = [open_eval_set(given, config.prompts, place, seed=config.seed) for place, given in enumerate(config.eval)]
    return Evaluator(config, me, scheduler, engine, encode, decoder(config, run_dir), environments, rows)


def text_bytes(prompt: str | Conversation) -> NDArray[np.int32]:
    """Return the token ids of a prompt for an engine without a tokenizer."""
    text = prompt.text() if isinstance(prompt, Conversation) else prompt
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
