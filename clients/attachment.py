"""Attach a worker to a run. The scheduler's address is enough; its reply has the other addresses."""

import asyncio
import logging

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.net.addresses import reachable
from staleflow.net.client import Client
from staleflow.net.errors import Refused, RunOver
from staleflow.net.retry import Backoff
from staleflow.process import readiness
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import Attach, AttachReply

log = logging.getLogger(__name__)

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
