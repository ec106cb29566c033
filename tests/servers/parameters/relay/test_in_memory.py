"""A relay stores its versions in shared memory, too, and leaves nothing there."""

from collections.abc import Callable

from staleflow.process import memory_folder
from staleflow.servers.parameters.relay.main import folder_of
from tests.servers.parameters.relay.growing import LARGE, RELAY_HOST, Grown, pulled, same
from tests.servers.running import Run


async def test_a_relay_lends_versions_from_memory_and_removes_them_at_its_end(
    make_run: Callable[..., Run], hosts: Callable[[str], None]
) -> None:
    hosts(RELAY_HOST)
    run = make_run(parameters={"store": "memory"})
    for start in (run.scheduler, run.trajectories, run.parameters):
        start()
    trainer = await run.trainer()
    await trainer.publish(0, LARGE)
    grown = Grown(run)
    disk = folder_of(run.run_dir, "relay-0")
    try:
        await grown.grow("relay-0")
        found, mapped = await pulled(grown.reader())
        same(found)
        assert mapped
        assert (memory_folder.path_of(disk) / "0-0.bin").stat().st_size > 0
        assert not list(disk.glob("*.bin"))
        await grown.end("relay-0")
        assert not memory_folder.path_of(disk).exists()
    finally:
        memory_folder.remove(disk)
        memory_folder.remove(run.run_dir / "parameters")
