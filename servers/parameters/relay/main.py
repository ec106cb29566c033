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
from staleflow.process import memory_folder, readiness
from staleflow.process.daemon import Stop, run
from staleflow.process.host import raise_file_limit
from staleflow.protocols.wire.messages import Attach
from staleflow.servers.parameters.main import FolderInUse, owned
from staleflow.servers.parameters.memory import open_memory
from staleflow.servers.parameters.relay.service import RelayService
from staleflow.servers.parameters.relay.sources import Upstream
from staleflow.servers.parameters.versions import Versions
from staleflow.servers.runner import Tasks, serve_attached

log = logging.getLogger(__name__)

BIND = "tcp://127.0.0.1:*"
"""Default address: reachable from workers on the same host only."""
FOLDER_TIMEOUT_S = 60.0
"""Time to wait for another relay to release the folder. After that this process exits, to be restarted."""
POLL_INTERVAL_S = 0.5


def attach(config: Config, run_dir: Path, name: str, scheduler: str, bind: str, mb_per_s: float) -> int:
    """Serve weights to nearby readers until a signal, or the end of the run; return the exit code."""
    raise_file_limit()
    if is_wildcard(bind):
        raise ConfigError(
            "--bind", bind, "readers are sent to this address, so it must be one address of this host, or loopback"
        )
    sockets = server_sockets(config)

    async def main(stop: Stop) -> None:
        with ExitStack() as resources:
            if await _owns(resources, folder_of(run_dir, name), stop):
                await serve_until(stop, config, run_dir, name, scheduler, bind, mb_per_s, transport=sockets)

    return run(main, name, run_dir)


async def _owns(resources: ExitStack, folder: Path, stop: Stop) -> bool:
    """Wait for the lock of the folder and hold it while ``resources`` is open; return False if stopped before.

    A machine whose connection was lost is replaced while its old processes are still draining, so a locked folder is no
    mistake of the operator. Raise ``TimeoutError`` after ``FOLDER_TIMEOUT_S``.
    """
    start_s, logged = time.monotonic(), False
    while not stop.is_set():
        try:
            resources.enter_context(owned(folder))
            return True
        except FolderInUse as error:
            if time.monotonic() - start_s >= FOLDER_TIMEOUT_S:
                raise TimeoutError(str(error)) from None
        if not logged:
            log.warning("waiting for folder %s: another relay still owns it", folder)
            logged = True
        await asyncio.sleep(POLL_INTERVAL_S)
    return False


def folder_of(run_dir: Path, name: str) -> Path:
    """Return the folder of a relay's versions. No other process uses it, whatever the name of the relay."""
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
    """Serve until stopped. ``mb_per_s``: limit of the incoming rate in 10^6 bytes per second; 0: none."""
    worker, parameters = worker_id(name), config.parameters
    to_scheduler = Client(scheduler, worker=worker, transport=transport)
    folder = folder_of(run_dir, name)
    memory = open_memory(folder, parameters)
    versions = Versions(folder, durability="process", memory=memory)
    for key in list(versions.stored):
        versions.delete(key)  # left by an earlier relay, perhaps of another run
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
        if memory is not None:
            memory.close()
        memory_folder.remove(folder)
