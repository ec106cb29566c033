"""A server that cannot serve prints the reason in one line, exits with code 2, and changes nothing."""

import asyncio
from collections.abc import Callable

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.process.daemon import Stop
from staleflow.servers.trajectories import main as trajectories
from tests.servers.running import Run, config_of, eventually


async def test_a_second_process_of_the_same_shard_is_refused(run: Run) -> None:
    await run.status(run.where.trajectories[0])
    with pytest.raises(ConfigError, match="is in use by process"):
        await trajectories.serve_until(Stop(), run.config, run.run_dir, 0)


async def test_a_store_that_is_none_is_named(make_run: Callable[..., Run]) -> None:
    run = make_run()
    (run.run_dir / "trajectories-0").mkdir()
    (run.run_dir / "trajectories-0" / "data.mdb").write_bytes(b"not at all" * 1000)
    with pytest.raises(ConfigError, match=r"data\.mdb cannot be opened"):
        await trajectories.serve_until(Stop(), run.config, run.run_dir, 0)


async def test_a_port_in_use_is_named(run: Run, make_run: Callable[..., Run]) -> None:
    await run.status(run.where.trajectories[0])
    await run.stop("trajectories-0")
    taken = {"bind": [run.where.parameters]}
    other = make_run(trajectories=taken)
    await run.status(run.where.parameters)
    with pytest.raises(ConfigError, match="it is in use"):
        await trajectories.serve_until(Stop(), other.config, run.run_dir, 0)


async def test_other_prompts_than_those_of_the_run_are_refused(run: Run) -> None:
    await run.rollout()  # the shard is attached
    await run.stop("trajectories-0")
    config = config_of(run.run_dir / "other", prompts={"path": str(run.run_dir / "prompts.jsonl")})
    (run.run_dir / "prompts.jsonl").write_text('{"prompt": "changed"}\n')
    with pytest.raises(ConfigError, match="it refuses trajectories-0"):
        await trajectories.serve_until(Stop(), config, run.run_dir, 0)


async def test_a_column_for_the_reward_that_the_rows_have_too_is_named(make_run: Callable[..., Run]) -> None:
    stage = {"name": "judge", "run": "m:f", "makes": ["answer"]}
    run = make_run(stage=[stage], reward={"run": "m:f", "needs": ["judge/answer"]})
    stop = Stop()
    asyncio.get_running_loop().call_later(60, stop.set, "it serves")
    with pytest.raises(ConfigError, match=r'reward\.needs is "judge/answer"; the rows of prompts have a column'):
        await trajectories.serve_until(stop, run.config, run.run_dir, 0)


async def test_a_server_waits_for_its_scheduler_and_can_be_stopped_meanwhile(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.trajectories()
    run.parameters()
    await run.status(run.where.trajectories[0])
    await run.stop("trajectories-0")
    run.trajectories()
    run.scheduler()

    async def attached() -> bool:
        return len((await run.status(run.where.scheduler))["workers"]) == 2

    assert await eventually(attached)
