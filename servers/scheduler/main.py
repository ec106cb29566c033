"""The scheduler process: open the store, resume the run from its last commit, and serve."""

import asyncio
import gc
import logging
from collections.abc import Callable
from pathlib import Path

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import addresses
from staleflow.configs.metrics import read_token
from staleflow.configs.schema import Config
from staleflow.net.endpoint import Endpoint
from staleflow.net.security import server_sockets
from staleflow.net.transport import SOCKETS, Sockets, Transport
from staleflow.process.clock import WALL, Clock, RunningClock
from staleflow.process.daemon import Stop, run
from staleflow.process.host import raise_file_limit
from staleflow.process.metrics_http import ScrapeServer
from staleflow.protocols.consistency.errors import RestoreError
from staleflow.protocols.wire.messages import PROTOCOL
from staleflow.servers.scheduler.ledger import identity as identities
from staleflow.servers.scheduler.ledger.identity import Identity
from staleflow.servers.scheduler.ledger.interpreter import TABLES, Interpreter
from staleflow.servers.scheduler.lengths.expected import Lengths
from staleflow.servers.scheduler.prompts.queue import PromptQueue
from staleflow.servers.scheduler.prompts.stream import BLOCK, Clustering
from staleflow.servers.scheduler.service import TICK_INTERVAL_S, Service, WakeLater
from staleflow.store import crash_recovery
from staleflow.store.base import Store, StoreCorrupt, StoreFull, StoreInUse
from staleflow.store.checksummed import CheckedStore
from staleflow.trace import run_history
from staleflow.trace.events import Open, Recovered
from staleflow.trace.writer import Trace, TraceError

log = logging.getLogger(__name__)

GC_OBJECTS = 50_000
"""Allocations between two garbage collections. Messages are short-lived and contain no reference cycles."""
CYCLE_DELAY_S = 0.002
"""Delay before the next coordination cycle when one cycle left work undone."""
DRAIN_NOTICE_S = 1.0
"""Maximum time for which a stopping scheduler waits until its rollout workers know of the drain."""


def serve(config: Config, run_dir: Path, session: str = "") -> int:
    """Serve until SIGTERM and return the exit code of the process. ``session``: see ``open_service``."""
    raise_file_limit()
    crash_recovery.note_crashes(run_dir / "scheduler")

    async def main(stop: Stop) -> None:
        store = open_store(config, run_dir)
        try:
            gc.freeze()  # modules and constants live until the end: no collection needs to scan them
            gc.set_threshold(GC_OBJECTS, 20, 100)
            await serve_until(stop, config, run_dir, store, transport=server_sockets(config), session=session)
        finally:
            store.close()

    return run(main, "scheduler", run_dir)


def open_store(config: Config, run_dir: Path) -> CheckedStore:
    """Open the store of the run, creating it if it is missing.

    Raises ``ConfigError`` if the store is in use, too small, or not a store.
    """
    settings, path = config.scheduler, run_dir / "scheduler"
    try:
        store = crash_recovery.open_store(
            path, tables=TABLES, map_bytes=settings.map_mb << 20, durability=settings.durability
        )
    except StoreInUse as error:
        raise ConfigError("run directory", str(run_dir), f"{error}") from error
    except (StoreCorrupt, StoreFull) as error:
        raise ConfigError("scheduler's store", str(path), f"{error}") from error
    return CheckedStore(store, path / "data.mdb")


def open_service(
    config: Config,
    run_dir: Path,
    store: Store,
    clock: Clock = WALL,
    run: str = "",
    lengths: Lengths | None = None,
    session: str = "",
    running: Clock | None = None,
    *,
    wake_later: WakeLater = lambda wake: None,
) -> tuple[Service, Interpreter]:
    """Restore the service from the store and write the ``open`` line of the trace.

    Raises ``ConfigError`` if the store belongs to another run.

    - ``run``: name of a new run; a name is generated if it is empty.
    - ``lengths``: replaces the configured ranker.
    - ``session``: a session that is not the stored one resumes a run that was drained or has finished.
    - ``running``: clock for leases, silence and every timeout; ``clock`` if omitted. The trace uses ``clock``.
    - ``wake_later``: calls its argument after ``CYCLE_DELAY_S``; without it, the next tick continues unfinished work.
    """
    old, identity = identities.stored(store), identities.identify(store, config, run_dir, run)
    durability = config.scheduler.durability
    if not (run_dir / "trace.jsonl").exists() and identity.incarnation == 1:
        _check_rest(run_dir, identity)  # first, so that a rejected start leaves no trace file of the new run behind
    try:
        trace = Trace(
            run_dir / "trace.jsonl",
            store,
            run=identity.run,
            incarnation=identity.incarnation,
            durability=durability,
            clock=clock,
        )
    except TraceError as error:
        raise ConfigError("trace", str(run_dir / "trace.jsonl"), str(error)) from error
    try:
        interpreter = Interpreter(
            store, identities.limits(config), trace, _prompt_queue(config, lengths), running or clock
        )
    except RestoreError as error:
        raise ConfigError("run directory", str(run_dir), str(error)) from error
    identities.check_steps(old, config, interpreter.machine.version)
    _check_rest(run_dir, identity, interpreter.machine.lineage, interpreter.machine.version)
    service = Service(config, run_dir, identity, interpreter, session=session, wake_later=wake_later)
    interpreter.with_commit(lambda txn: identities.save(txn, identity))
    interpreter.open(_opened(config, identity, interpreter))
    service.flush()
    return service, interpreter


def _check_rest(run_dir: Path, identity: Identity, lineage: int = 0, version: int = -1) -> None:
    """Raise ``ConfigError`` if another part of the run directory belongs to another run or is newer than the ledger."""
    for path, history in run_history.of_run(run_dir):
        run_history.check_ledger(path, history, run=identity.run, lineage=lineage, version=version)


def _prompt_queue(config: Config, lengths: Lengths | None) -> PromptQueue:
    """Build the prompt queue with the configured ranker and batch composition."""
    chosen = config.coordination
    clustering = None
    if chosen.composition == "length_clustered":
        clustering = Clustering(batch_size=config.trainer.batch_size, lookahead=chosen.lookahead)
    lengths = lengths or Lengths(chosen.ranker, ahead=clustering.block if clustering else BLOCK)
    return PromptQueue(
        seed=config.seed,
        epochs=config.prompts.epochs,
        lengths=lengths,
        clustering=clustering,
        submitted=config.prompts.submitted,
    )


def _opened(config: Config, identity: Identity, interpreter: Interpreter) -> Open:
    machine = interpreter.machine
    limits = interpreter.limits
    counts = machine.state_counts()
    return Open(
        max_staleness=limits.max_staleness,
        batch_size=limits.batch_size,
        group_size=config.rollout.group_size,
        bound=limits.bound,
        min_trainable=limits.min_trainable,
        on_overdue=limits.on_overdue,
        lease_ms=limits.lease_ms,
        protocol=PROTOCOL,
        config_sha=identity.config_sha,
        recovered=Recovered(
            reserved=counts["leased"] + counts["pushed"],
            occupied=counts["occupied"],
            sealed=counts["sealed"],
            last_seq=interpreter.trace.seq,
            lineage=machine.lineage,
            version=machine.version,
        ),
    )


async def serve_until(
    stop: Stop,
    config: Config,
    run_dir: Path,
    store: Store,
    *,
    clock: Clock = WALL,
    transport: Transport = SOCKETS,
    session: str = "",
) -> None:
    """Serve until stopped, or until this incarnation of the run is closed and its trace has ended."""
    token = read_token(config.metrics.token)
    running = RunningClock(clock)
    service, interpreter = open_service(
        config, run_dir, store, clock, session=session, running=running, wake_later=_wake_later
    )
    endpoint = Endpoint(
        addresses(config, run_dir).scheduler,
        on_call=service.on_call,
        on_drained=service.flush,
        on_gone=service.on_gone,
        on_reject=service.on_reject,
        on_denied=service.on_denied,
        name_conflict=service.name_conflict,
        transport=transport,
    )
    if isinstance(transport, Sockets):
        transport.on_rejected = service.on_rejected
    log.info("scheduler listening on %s", endpoint.address)
    scraped = _scraped(config, service, token)
    serving = asyncio.create_task(endpoint.serve())
    ticking = asyncio.create_task(_tick(service, endpoint, running))
    ended = asyncio.create_task(stop.wait())
    try:
        if scraped is not None:
            await scraped.start()
            log.info("metrics served at %s", scraped.url)
        await asyncio.wait((serving, ticking, ended), return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, ticking):
            if task.done():
                task.result()
        service.drain()
        await _until_drain_is_known(service)
        service.close(stop.why)
    finally:
        ticking.cancel()
        ended.cancel()
        endpoint.close()
        if scraped is not None:
            await scraped.close()
        interpreter.trace.close()
        await asyncio.gather(serving, ticking, ended, return_exceptions=True)


async def _until_drain_is_known(service: Service) -> None:
    """Keep serving until every live rollout worker has been told to leave, at most ``DRAIN_NOTICE_S``.

    A worker without an open report sends the next one soon. If nobody answered it, a worker that was attached by hand
    would wait for the next scheduler.
    """
    service.flush()
    for _ in range(int(DRAIN_NOTICE_S / TICK_INTERVAL_S)):
        if service.drain_known:
            return
        await asyncio.sleep(TICK_INTERVAL_S)


def _wake_later(wake: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(CYCLE_DELAY_S, wake)


def _scraped(config: Config, service: Service, token: str) -> ScrapeServer | None:
    """Build the Prometheus endpoint; None if ``metrics.bind`` is empty."""
    bind = config.metrics.bind
    if not bind:
        return None
    wide = bool(token) or config.security.insecure
    return ScrapeServer(bind, service.exposition.text, token=token, wide=wide)


async def _tick(service: Service, endpoint: Endpoint, clock: RunningClock) -> None:
    paused_s = 0.0
    while True:
        await asyncio.sleep(TICK_INTERVAL_S)
        service.tick(endpoint.peers)
        if clock.paused_s > paused_s:
            pause_s = clock.paused_s - paused_s
            log.warning("scheduler was paused for %.1f s; leases and peers do not age during a pause", pause_s)
            paused_s = clock.paused_s
