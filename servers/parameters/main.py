"""The process of the parameter server."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from staleflow.configs.durable_files import make_folder
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import addresses, config_sha
from staleflow.configs.schema import Config
from staleflow.net.client import Client, worker_id
from staleflow.net.errors import Refused, RunOver, Unavailable
from staleflow.net.security import server_sockets
from staleflow.net.transport import SOCKETS, Transport
from staleflow.process import memory_folder, readiness
from staleflow.process.daemon import Stop, run
from staleflow.process.host import raise_file_limit
from staleflow.protocols.wire.messages import Attach, AttachReply, GetStatus, SchedulerStatus
from staleflow.servers.parameters.memory import open_memory
from staleflow.servers.parameters.mirror import Mirror
from staleflow.servers.parameters.service import ParameterService
from staleflow.servers.parameters.versions import Versions
from staleflow.servers.runner import Tasks, serve_attached
from staleflow.store.mirror import url_of
from staleflow.store.objects import Objects
from staleflow.trace import run_history

NAME = "parameters"
END_TIMEOUT_S = 1.0
"""Time to ask a scheduler, which may have stopped before, whether the run has ended."""


def serve(config: Config, run_dir: Path) -> int:
    """Serve the weights of the run in ``run_dir`` until a signal; return the exit code."""
    raise_file_limit()

    async def main(stop: Stop) -> None:
        with owned(run_dir / NAME):
            await serve_until(stop, config, run_dir, transport=server_sockets(config))

    return run(main, NAME, run_dir)


def open_mirror(mirror: str, versions: Versions, run: str) -> Mirror:
    """Return the mirror of a run, without contacting it. Raise ``ConfigError`` if its package is missing."""
    return Mirror(Objects(url_of(mirror, run)), versions, run)


class FolderInUse(ConfigError):
    """Another process owns the folder."""


@contextmanager
def owned(folder: Path) -> Generator[None]:
    """Lock the folder for this process.

    Lock before touching anything in it: files that look abandoned may be in use by a live server. Raise
    ``FolderInUse``, or ``ConfigError`` if the file system does not support locks.
    """
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUse("folder", str(folder), "in use by another process") from None
        except OSError as error:
            why = f"its file system does not lock it (flock: {error.strerror}, errno {error.errno})"
            raise ConfigError("folder", str(folder), why) from error
        yield
    finally:
        os.close(descriptor)


async def serve_until(stop: Stop, config: Config, run_dir: Path, *, transport: Transport = SOCKETS) -> None:
    """Serve until stopped; publishes in progress may finish."""
    where, worker = addresses(config, run_dir), worker_id(NAME)
    memory = open_memory(run_dir / NAME, config.parameters)
    versions = Versions(run_dir / NAME, durability=config.parameters.durability, memory=memory)
    scheduler = Client(where.scheduler, worker=worker, transport=transport)

    def hello(address: str) -> Attach:
        return Attach(
            worker=worker,
            name=NAME,
            role="parameters",
            config_sha=config_sha(config),
            endpoint=address,
            pid=os.getpid(),
        )

    services: list[ParameterService] = []

    def make(tasks: Tasks) -> ParameterService:
        parameters = config.parameters
        service = ParameterService(
            versions,
            scheduler,
            tasks,
            keep_versions=parameters.keep_versions,
            chunk_bytes=parameters.chunk_kb << 10,
            delta=parameters.delta,
            budget_bytes=parameters.budget_mb << 20,
            mirror=partial(open_mirror, parameters.mirror, versions) if parameters.mirror else None,
        )
        services.append(service)
        return service

    def on_attached(attached: AttachReply) -> None:
        run_history.check(versions.reached, attached, run_dir / NAME)
        versions.reach(attached.run)
        services[0].run = attached.run

    ended = False
    try:
        await serve_attached(
            stop,
            bind=where.parameters,
            scheduler=scheduler,
            hello=hello,
            make=make,
            on_attached=on_attached,
            transport=transport,
        )
        ended = memory is not None and not readiness.slot() and await _has_finished(where.scheduler, transport)
    except RunOver:
        ended = True
        raise
    finally:
        if memory is not None:
            memory.close()
        if ended:
            memory_folder.remove(run_dir / NAME)


async def _has_finished(address: str, transport: Transport) -> bool:
    """Return True if the scheduler reports the end of the run: a server that was started by hand has no supervisor
    that cleans up behind it."""
    scheduler = Client(address, worker=worker_id(NAME), transport=transport)
    try:
        status = await scheduler.ask(GetStatus(), SchedulerStatus, timeout_s=END_TIMEOUT_S)
    except (Refused, Unavailable):
        return False
    finally:
        scheduler.close()
    return status.finished
