"""Attach a worker to a run. The scheduler's address is enough; its reply has the other addresses."""

import asyncio
import logging
from pathlib import Path

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import addresses, read_run
from staleflow.net.addresses import reachable
from staleflow.net.client import Client
from staleflow.net.errors import Refused, RunOver, Unavailable
from staleflow.net.permissions import Role
from staleflow.net.retry import Backoff
from staleflow.net.security import client_sockets
from staleflow.net.transport import Transport
from staleflow.process import readiness
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import Attach, AttachReply, Detach, Done

log = logging.getLogger(__name__)

DETACH_TIMEOUT_S = 1.0
NOTICE_DELAY_S = 2.0
"""Time without a reply after which the log names the address that this process waits for."""


async def attach(scheduler: Client, request: Attach, *, parameters: bool = False) -> AttachReply:
    """Attach and return the reply, once every trajectory server (and, if requested, the parameter server) is attached.

    Waits for servers that have not started, and for a bounded time for a name whose owner may have died. Raise
    ``RunOver`` after the end of the run, ``ConfigError`` if the run rejects this worker.
    """
    request = msgspec.structs.replace(request, slot=request.slot or readiness.slot())
    backoff, attempt = Backoff(0.1, 1.0), 0
    while True:
        waiting = "waiting for the scheduler at %s: no answer yet"
        notice = asyncio.get_running_loop().call_later(NOTICE_DELAY_S, log.info, waiting, scheduler.address)
        try:
            answer = await scheduler.ask(request, AttachReply, timeout_s=None)
        except Refused as refused:
            if refused.is_over:
                raise RunOver from refused
            if refused.code in (Code.DENIED, Code.CONFLICT, Code.FENCED, Code.BUSY):
                raise ConfigError(f"{request.role} worker", request.name, refused.detail) from refused
            raise
        finally:
            notice.cancel()
        if answer.shards and all(answer.shards) and (answer.parameters or not parameters):
            readiness.report_attached()
            return msgspec.structs.replace(
                answer,
                shards=[reachable(shard, scheduler.address) for shard in answer.shards],
                parameters=reachable(answer.parameters, scheduler.address),
            )
        attempt += 1
        log.info("waiting for the other servers of the run to attach")
        await asyncio.sleep(backoff.delay_s(attempt))


async def detach(scheduler: Client, request: Detach) -> None:
    """Leave the run; nothing depends on the reply."""
    try:
        await scheduler.ask(request, Done, timeout_s=DETACH_TIMEOUT_S)
    except (Refused, Unavailable) as error:
        log.info("the scheduler did not receive the detach message: %s", error)


def locate(run: Path | str, role: Role, transport: Transport | None) -> tuple[str, Transport]:
    """Return the scheduler's address of a run, given by it or by the run's directory, and the sockets to connect with.

    Raise ``ConfigError`` for a directory without a run, or an unusable key.
    """
    text = str(run)
    if "://" in text:
        return text, transport or client_sockets(None, role)
    folder = Path(run)
    config = read_run(folder)
    return addresses(config, folder).scheduler, transport or client_sockets(config.security, role)


async def attach_within(
    timeout_s: float, scheduler: Client, request: Attach, *, parameters: bool = False
) -> AttachReply:
    """Like ``attach``, for a client without a supervisor: raise ``Unavailable`` after ``timeout_s``, and
    ``ConfigError`` if the run is over."""
    try:
        async with asyncio.timeout(timeout_s):
            return await attach(scheduler, request, parameters=parameters)
    except TimeoutError:
        why = f"{request.name} waited for the run's servers to attach"
        raise Unavailable(scheduler.address, timeout_s, why) from None
    except RunOver as over:
        raise ConfigError("run", scheduler.address, f"{over}; connect to one that is active") from over
