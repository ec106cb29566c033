"""After a scheduler was stopped for longer than a lease, its workers count as alive and keep their leases."""

import asyncio
import json
from pathlib import Path

from tests.servers.scheduler.world import Cast, World, config

LEASE_S = 6.0
PAUSE_S = 7.5
"""Longer than a lease and than the silence limit of a peer."""


async def test_a_pause_of_the_scheduler_expires_no_lease_and_loses_no_peer(short_dir: Path) -> None:
    world = World(short_dir / "run", config(lease_s=LEASE_S))
    world.start()
    try:
        cast = await Cast(world).enter()
        await cast.instance.until_held(4)
        world.pause(PAUSE_S)
        # Ticks pass before the worker reports: a scheduler that trusted the clock alone would expire all four leases.
        await world.status()
        await asyncio.sleep(0.5)
        assert (await world.status())["ledger"]["leased"] == 4
        await cast.instance.report()
        assert cast.instance.aborted == []
        await cast.finish(4)
        world.stop()
        lines = [json.loads(line) for line in (world.run_dir / "trace.jsonl").read_bytes().splitlines()]
        assert [line for line in lines if line["ev"] in ("release", "detach")] == []
        world.audit()
    finally:
        world.close()
