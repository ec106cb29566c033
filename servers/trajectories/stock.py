"""Compare a shard with the ledger: a disk may have been lost, a record damaged.

Consumes the groups that the ledger expects of the shard, page by page. Missing groups are abandoned, and their prompts
are generated again. Waits inside one call at a time.
"""

import asyncio
import logging

from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import Expected, GetExpected
from staleflow.servers.trajectories.shard import RETRY_INTERVAL_S, Shard

log = logging.getLogger(__name__)


async def take_stock(scheduler: Client, shard: Shard) -> None:
    """Check every expected group once. The stored payloads must have been loaded before."""
    lost, after = 0, GroupId(-1)
    while True:
        try:
            expected = await scheduler.ask(GetExpected(shard=shard.shard, after=after), Expected, timeout_s=None)
        except Refused:  # may be temporary: a key is currently not allowed, or the run is over
            await asyncio.sleep(RETRY_INTERVAL_S)
            continue
        if not expected.groups:
            break
        missing = [
            shard.missing(group, sha)
            for group, sha in zip(expected.groups, expected.shas, strict=True)
            if shard.holdings.find_sha(group, sha) is None
        ]
        lost += sum(await asyncio.gather(*missing))
        after = expected.groups[-1]
    if lost:
        log.error("%d groups that had been pushed are missing from the store and were abandoned", lost)
