"""Files that are deleted under a running scheduler are named in its log and written again."""

import shutil
from pathlib import Path

from staleflow.configs.loading.load import read_run
from tests.servers.running import eventually
from tests.servers.scheduler.world import Cast, World


async def test_a_deleted_trace_and_configuration_are_written_again_and_the_run_resumes(world: World) -> None:
    cast = await Cast(world).enter()
    await cast.finish(2)
    trace = world.run_dir / "trace.jsonl"
    trace.unlink()
    (world.run_dir / "config.json").unlink()
    await eventually(lambda: _exist(trace, world.run_dir / "config.json"))
    assert read_run(world.run_dir) == world.config
    batch = await cast.trainer.next_batch(0)
    await cast.trainer.publish(1, batch.batch)
    log = (world.run_dir / "logs" / "scheduler.log").read_text()
    assert log.count("trace.jsonl was deleted during the run") == 1
    assert log.count("config.json was deleted during the run") == 1
    world.kill()
    world.start()
    assert (await world.status())["version"] == 1
    assert world.stop() == 0
    assert world.audit().steps == 1


async def test_a_deleted_socket_is_made_again(world: World) -> None:
    await Cast(world).enter()
    socket = Path(world.address.removeprefix("ipc://"))
    shutil.rmtree(socket.parent)
    await eventually(lambda: _exist(socket))
    assert (await world.status())["incarnation"] == 1  # over a new connection
    log = (world.run_dir / "logs" / "scheduler.log").read_text()
    assert log.count(f"{socket} was deleted while this server listens on it") == 1
    assert world.stop() == 0


async def _exist(*paths: Path) -> bool:
    return all(path.exists() for path in paths)
