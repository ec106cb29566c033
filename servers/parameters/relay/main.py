"""The process of a relay: ``staleflow attach relay``."""

import asyncio
import logging
import os
import time
from contextlib import ExitStack
from pathlib import Path

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import config_sha
from staleflow.configs.schema import Config
from staleflow.net.addresses import is_wildcard
from staleflow.net.client import Client, worker_id
from staleflow.net.security import server_sockets
from staleflow.net.transport import SOCKETS, Transport
from staleflow.process import readiness
from staleflow.process.daemon import Stop, run
from staleflow.process.host import raise_file_limit
from staleflow.protocols.wire.messages import Attach
from staleflow.servers.parameters.main import Taken, owned
from staleflow.servers.parameters.relay.service import RelayService
from staleflow.servers.parameters.relay.sources import Upstream
from staleflow.servers.parameters.versions import Versions
from staleflow.servers.runner import Tasks, serve_attached

log = logging.getLogger(__name__)

BIND = "tcp://127.0.0.1:*"
"""For workers of the same host; others need an address of this host that they reach."""
FREE_S = 60.0
"""In which another relay must leave the folder. Then this process ends, to be started again."""
POLL_INTERVAL_S = 0.5


def attach(config: Config, run_dir: Path, name: str, scheduler: str, bind: str, mb_per_s: float) -> int:
    """Give weights to readers near here until a signal, or the end of the run; returns the exit code."""
    raise_file_limit()
    if is_wildcard(bind):
        raise ConfigError("--bind", bind, "readers are sent there: it must name one address of this host, or loopback")
    sockets = server_sockets(config)

    async def main(stop: Stop) -> None:
        with ExitStack() as held:
            if await _owns(held, folder_of(run_dir, name), stop):
                await serve_until(stop, config, run_dir, name, scheduler, bind, mb_per_s, transport=sockets)

    return run(main, name, run_dir)


async def _owns(held: ExitStack, folder: Path, stop: Stop) -> bool:
    """Whether the folder is this process's, while ``held`` is open; False when stopped before. A machine whose link was
    lost is started anew while its old processes still drain: that is no mistake of the operator. ``TimeoutError``."""
    began, waits = time.monotonic(), False
    while not stop.is_set():
        try:
            held.enter_context(owned(folder))
            return True
        except Taken as taken:
            if time.monotonic() - began >= FREE_S:
                raise TimeoutError(str(taken)) from None
        if not waits:
            log.warning("waits for %s: another relay still has it", folder)
            waits = True
        await asyncio.sleep(POLL_INTERVAL_S)
    return False


def folder_of(run_dir: Path, name: str) -> Path:
    """Where a relay keeps what it gives: never what is another process's, whatever it is called."""
    return run_dir / "relays" / name


async def serve_until(
    stop: Stop,
    config: Config,
    run_dir: Path,
    name: str,
    scheduler: str,
    bind: str = BIND,
    mb_per_s: float = 0.0,
    *,
    transport: Transport = SOCKETS,
) -> None:
    """Serve until stopped. ``mb_per_s`` bounds what is asked for, in 10^6 bytes a second; 0 does not."""
    worker, parameters = worker_id(name), config.parameters
    to_scheduler = Client(scheduler, worker=worker, transport=transport)
    versions = Versions(folder_of(run_dir, name), durability="process")
    for key in list(versions.stored):
        versions.delete(key)  # of a relay that was here before, perhaps in another run
    upstream = Upstream(worker, bytes_per_s=mb_per_s * 1e6, deltas=parameters.delta != "off", transport=transport)
    services: list[RelayService] = []

    def make(tasks: Tasks) -> RelayService:
        services.append(
            RelayService(
                versions,
                to_scheduler,
                upstream,
                tasks,
                stop,
                keep_versions=parameters.keep_versions,
                chunk_bytes=parameters.chunk_kb << 10,
                delta=parameters.delta,
            )
        )
        return services[0]

    def hello(address: str) -> Attach:
        services[0].hello = Attach(
            worker=worker,
            name=name,
            role="relay",
            config_sha=config_sha(config),
            endpoint=address,
            pid=os.getpid(),
            slot=readiness.slot(),
        )
        return services[0].hello

    try:
        await serve_attached(stop, bind=bind, scheduler=to_scheduler, hello=hello, make=make, transport=transport)
    finally:
        upstream.close()
