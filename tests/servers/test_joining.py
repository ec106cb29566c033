"""A worker that knows only the address of a scheduler on its machine accepts no run of another user."""

import asyncio

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import config_sha, difference
from staleflow.net.client import worker_id
from staleflow.protocols.wire.messages import Ping, Pong
from staleflow.supervisor.joining import join_run
from tests.servers.running import Run


@pytest.mark.parametrize("what", ["socket", "run directory"])
async def test_a_run_that_others_may_write_to_is_not_joined(run: Run, what: str) -> None:
    address = run.where.scheduler
    await run.client(address, worker_id("rollout-0")).ask(Ping(), Pong, timeout_s=20)
    path = run.run_dir if what == "run directory" else run.run_dir / "sock" / "scheduler"
    mode = path.stat().st_mode
    path.chmod(mode | 0o022)
    with pytest.raises(ConfigError, match=rf'{what} is "{path}"; others may write to it .*chmod go-w'):
        await asyncio.to_thread(join_run, address, "rollout")
    path.chmod(mode)
    assert await asyncio.to_thread(join_run, address, "rollout") == (run.config, run.run_dir.resolve())


async def test_a_rollout_worker_joins_with_settings_of_its_own(run: Run) -> None:
    address = run.where.scheduler
    await run.client(address, worker_id("rollout-0")).ask(Ping(), Pong, timeout_s=20)
    config, _ = await asyncio.to_thread(join_run, address, "rollout", None, ["rollout.max_inflight=99"])
    assert difference(config, run.config) == ("rollout.max_inflight", 99, run.config.rollout.max_inflight)
    assert config_sha(config) == config_sha(run.config)
    for role, override, line in (
        ("rollout", "seed=9", "seed is 9; all processes of a run share it"),
        ("train", "rollout.max_inflight=99", r'override is "rollout\.max_inflight=99"; run ".*" at .* has its'),
    ):
        with pytest.raises(ConfigError, match=line):
            await asyncio.to_thread(join_run, address, role, None, [override])
