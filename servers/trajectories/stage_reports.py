"""Report to the scheduler how many groups wait in each stage and how full the shard is.

``status --why`` names the stage that groups wait in from these reports. Consumes the queues of a shard; produces one
report a second, so that a restarted scheduler has them soon. No decision depends on them.
"""

import asyncio
import logging

from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Done, StageFailing, StageLoad, StageLoads
from staleflow.protocols.wire.messages.stages import MAX_FAILING, MAX_NAMED_GROUPS
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.stage_queue import Failing

log = logging.getLogger(__name__)

INTERVAL_S = 1.0


async def report_stages(scheduler: Client, shard: Shard) -> None:
    """Send reports until cancelled. A refusal may be temporary, so it is logged once and reports continue."""
    logged = ""
    while True:
        await asyncio.sleep(INTERVAL_S)
        report = StageLoads(shard=shard.shard, loads=loads_of(shard), used_share=shard.used_share(), full=shard.full())
        try:
            await scheduler.ask(report, Done, timeout_s=None)
        except Refused as refusal:
            if str(refusal) != logged:
                log.warning("scheduler rejected the stage report: %s", refusal)
            logged = str(refusal)
        else:
            logged = ""


def loads_of(shard: Shard) -> list[StageLoad]:
    """Return the load of the stages that have groups or failing workers, in the order of the graph."""
    now_s = shard.now_s()
    return [
        StageLoad(
            stage=stage,
            waiting=len(queue),
            taken=queue.taken,
            groups=queue.first(MAX_NAMED_GROUPS),
            calls=queue.calls,
            failing=[_failing(one, now_s) for one in failing[:MAX_FAILING]],
            passed=shard.num_passed(stage) if failing else 0,
        )
        for stage, queue in shard.queues.items()
        if (failing := queue.failing()) or len(queue) or queue.taken
    ]


def _failing(one: Failing, now_s: float) -> StageFailing:
    return StageFailing(
        worker=WorkerId(one.worker),
        failures=one.failures,
        failing_ms=round(1000 * max(0.0, now_s - one.since_s)),
        held_ms=round(1000 * max(0.0, one.held_until_s - now_s)),
        why=one.why,
    )
