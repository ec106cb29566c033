"""The process of one trajectory server."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

from staleflow.configs.columns import typed_columns
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import addresses, config_sha
from staleflow.configs.loading.prompt_rows import open_prompts
from staleflow.configs.rewards import components
from staleflow.configs.rules.algorithm import filter_of
from staleflow.configs.rules.coordination import samples_started
from staleflow.configs.schema import Config
from staleflow.configs.stages import calls_a_group, check_row, graph, seconds_a_group
from staleflow.net.client import Client, worker_id
from staleflow.net.security import server_sockets
from staleflow.net.transport import SOCKETS, Transport
from staleflow.process.daemon import Stop, run
from staleflow.process.host import raise_file_limit
from staleflow.protocols.wire.messages import Attach, AttachReply
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.servers.runner import Tasks, serve_attached
from staleflow.servers.trajectories.filters import FILTERS
from staleflow.servers.trajectories.prompts import LoadedPrompts, Prompts, SubmittedPrompts
from staleflow.servers.trajectories.registrar import Registrar
from staleflow.servers.trajectories.service import TrajectoryService
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.slabs import Slabs
from staleflow.servers.trajectories.stage_calls import StageCalls
from staleflow.servers.trajectories.stage_times import StageTimes, path_of
from staleflow.servers.trajectories.store import TABLES, TrajectoryStore
from staleflow.store.base import Store, StoreCorrupt, StoreFull, StoreInUse
from staleflow.store.crash_recovery import note_crashes, open_store
from staleflow.trace import run_history

GC_OBJECTS = 50_000
"""Allocations between two runs of the garbage collector. With the default, a start with many records spends half its
time in the collector."""
STAGE_SLACK_S = 10.0
"""Time added to the total time limit of a group's calls before its ticket expires."""


def name_of(shard: int) -> str:
    """Return the process name of a shard."""
    return f"trajectories-{shard}"


def serve(config: Config, run_dir: Path, shard: int) -> int:
    """Serve one shard of the trajectories of the run in ``run_dir`` until a signal; return the exit code."""
    raise_file_limit()
    note_crashes(run_dir / name_of(shard))
    gc.freeze()
    gc.set_threshold(GC_OBJECTS, 20, 100)
    return run(
        lambda stop: serve_until(stop, config, run_dir, shard, transport=server_sockets(config)),
        name_of(shard),
        run_dir,
    )


async def serve_until(
    stop: Stop,
    config: Config,
    run_dir: Path,
    shard: int,
    *,
    opened: Callable[..., Store] = open_store,
    transport: Transport = SOCKETS,
    slabs: bool = True,
) -> None:
    """Serve until stopped. Pushes in progress are still registered and acknowledged.

    ``opened``: function that opens the tables. ``slabs``: False on a simulated machine without a disk for slabs.
    """
    where, worker = addresses(config, run_dir), worker_id(name_of(shard))
    scheduler = Client(where.scheduler, worker=worker, transport=transport)
    prompts = _open_prompts(config, scheduler)
    store = _open_store(config, run_dir / name_of(shard), opened, slabs=slabs)

    def hello(address: str) -> Attach:
        return Attach(
            worker=worker,
            name=name_of(shard),
            role="trajectories",
            config_sha=config_sha(config),
            endpoint=address,
            shard=shard,
            rows=prompts.num_rows,
            prompts_sha=prompts.sha,
            pid=os.getpid(),
        )

    def make(tasks: Tasks) -> TrajectoryService:
        return make_service(config, shard, store, prompts, scheduler, tasks, times)

    def on_attached(attached: AttachReply) -> None:
        run_history.check(store.reached, attached, run_dir / name_of(shard))
        store.reach(attached.run)

    times = StageTimes(path_of(run_dir, shard)) if slabs else None
    try:
        await serve_attached(
            stop,
            bind=where.trajectories[shard],
            scheduler=scheduler,
            hello=hello,
            make=make,
            on_attached=on_attached,
            transport=transport,
        )
    finally:
        store.close()


def _open_prompts(config: Config, scheduler: Client) -> Prompts:
    if config.prompts.submitted:
        return SubmittedPrompts(scheduler)
    rows = open_prompts(config.prompts, seed=config.seed)
    if components(config.reward):
        check_row(config.reward.needs, rows[0], "prompts")
    return LoadedPrompts(rows)


def _open_store(config: Config, path: Path, opened: Callable[..., Store], *, slabs: bool) -> TrajectoryStore:
    settings = config.trajectories
    try:
        map_bytes = settings.map_mb << 20
        store = opened(path, tables=TABLES, map_bytes=map_bytes, durability=settings.durability)
        return TrajectoryStore(
            store,
            map_bytes=map_bytes,
            slabs=Slabs(path / "slabs", map_bytes=map_bytes) if slabs and settings.mapped else None,
            sync=settings.durability == "power",
        )
    except StoreInUse as error:
        raise ConfigError("run directory", str(path.parent), str(error)) from error
    except (StoreCorrupt, StoreFull) as error:
        raise ConfigError("trajectory server's store", str(path), str(error)) from error


def payload_limits(config: Config) -> PayloadLimits:
    """Return the limits that the configuration sets for a push."""
    environment, sampled = config.environment, config.rollout.max_new_tokens
    if environment.run:  # each call of an episode may sample that many tokens
        sampled *= environment.max_turns
    return PayloadLimits(
        sampled_tokens=sampled,
        environment=bool(environment.run),
        columns=typed_columns(config.column, router_replay=config.trainer.router_replay),
    )


def make_service(
    config: Config,
    shard: int,
    store: TrajectoryStore,
    prompts: Prompts,
    scheduler: Client,
    tasks: Tasks,
    times: StageTimes | None = None,
) -> TrajectoryService:
    """Wire the parts of a shard together."""
    registrar = Registrar(scheduler)
    state = Shard(store, registrar, shard=shard, stages=graph(config), keep=FILTERS[filter_of(config)])
    calls = StageCalls(
        state,
        tasks,
        prompts=prompts,
        seconds_a_group={stage: seconds + STAGE_SLACK_S for stage, seconds in seconds_a_group(config).items()},
        calls_a_group={node.name: calls_a_group(config, node.name) for node in graph(config)},
        times=times,
    )
    return TrajectoryService(
        state,
        calls,
        prompts,
        registrar,
        scheduler,
        tasks,
        group_size=config.rollout.group_size,
        samples_started=samples_started(config.rollout),
        limits=payload_limits(config),
        describes=config.coordination.ranker == "learned",
    )
