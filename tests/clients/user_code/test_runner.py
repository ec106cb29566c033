"""The reward runner executes a user's function behind a process, a time limit and retries."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from staleflow.clients.user_code.rewards import RewardFailed, RewardRunner, Sample
from staleflow.configs.errors import ConfigError

REWARDS = Path(__file__).parent / "rewards.py"


@asynccontextmanager
async def running(
    name: str, *, timeout_s: float = 60.0, retries: int = 0, concurrency: int = 64
) -> AsyncGenerator[RewardRunner]:
    runner = RewardRunner(f"{REWARDS}:{name}", timeout_s=timeout_s, retries=retries, concurrency=concurrency)
    try:
        await runner.start()
        yield runner
    finally:
        await runner.close()


def said(*completions: str) -> list[Sample]:
    return [Sample(prompt="1+1=", completion=completion) for completion in completions]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_rewards_come_in_the_order_of_the_samples() -> None:
    async with running("length") as runner:
        assert await runner.score(said("a", "", "abc")) == [1.0, 0.0, 3.0]


async def test_the_columns_of_the_row_are_keyword_arguments() -> None:
    async with running("columns") as runner:
        sample = Sample(prompt="1+1=", completion="2", columns={"answer": "1+1=2", "weight": 0.5})
        assert await runner.score([sample]) == [0.5]


async def test_calls_of_an_async_reward_run_side_by_side() -> None:
    async with running("slowly") as runner, asyncio.timeout(60.0):  # one after the other, they take two minutes
        assert await runner.score(said(*map(str, range(60)))) == list(map(float, range(60)))


async def test_no_more_calls_are_under_way_than_the_concurrency_and_so_many_are(tmp_path: Path) -> None:
    columns = {"folder": str(tmp_path)}
    many = [Sample(prompt="", completion=str(number), columns=columns) for number in range(200)]
    async with running("together", concurrency=100) as runner, asyncio.timeout(60.0):
        assert runner.calls == 100
        most = await runner.score(many)
    assert max(most) == 100
    async with running("length", concurrency=100) as runner:
        assert runner.calls == 1, "only an async def has more"


async def test_calls_beside_one_that_ends_the_process_run_again_and_are_not_charged() -> None:
    async with running("stuck") as runner:
        crashing = asyncio.ensure_future(runner.score(said("exit")))
        assert await runner.score(said("1", "2")) == [1.0, 2.0]
        with pytest.raises(RewardFailed, match=r"the reward's process ended with code 5 \(1 try\)"):
            await crashing
        assert runner.failed_calls == 1


async def test_a_reward_that_raises_is_tried_again_and_then_named() -> None:
    async with running("raises", retries=2) as runner:
        with pytest.raises(RewardFailed, match=r"raised ValueError: cannot judge 2, at rewards\.py:\d+ \(3 tries\)"):
            await runner.score(said("2"))
        assert runner.failed_calls == 3


async def test_an_error_of_a_library_is_said_with_the_line_that_called_it() -> None:
    (line,) = (number for number, text in enumerate(REWARDS.read_text().splitlines(), 1) if "json.loads" in text)
    async with running("reads") as runner:
        with pytest.raises(RewardFailed, match=rf"raised JSONDecodeError: .*, at rewards\.py:{line} \(1 try\)"):
            await runner.score(said("{"))


async def test_an_error_of_the_call_itself_has_no_line() -> None:
    async with running("columns") as runner:
        with pytest.raises(RewardFailed, match=r"missing 2 required keyword-only arguments: 'answer' and 'weight' \("):
            await runner.score(said("2"))


async def test_a_reward_that_always_fails_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    began = time.monotonic()
    async with running("raises", retries=2) as runner:
        for _ in range(40):
            with pytest.raises(RewardFailed):
                await runner.score(said("2"))
    tries = [message for message in caplog.messages if message.startswith("try ")]
    assert tries[0].startswith("try 1 of 3: the reward raised ValueError: cannot judge 2, at rewards.py:")
    assert len(tries) <= 1 + (time.monotonic() - began) < 120


@pytest.mark.slow
async def test_a_reward_that_hangs_is_killed_and_named() -> None:
    async with running("hangs", timeout_s=5.0, retries=1) as runner:
        with pytest.raises(RewardFailed, match=r"took longer than 5 s \(2 tries\)"):
            await runner.score(said("hang"))
        assert await runner.score(said("fine")) == [1.0]


@pytest.mark.slow
async def test_a_reward_that_hangs_once_is_tried_again(tmp_path: Path) -> None:
    async with running("hangs_once", timeout_s=15.0, retries=1) as runner:
        sample = Sample(prompt="", completion="", columns={"marker": str(tmp_path / "marker")})
        assert await runner.score([sample]) == [7.0]
        assert runner.failed_calls == 1


@pytest.mark.slow
async def test_an_overdue_await_costs_nobody_else_his_call() -> None:
    async with running("stuck", timeout_s=15.0) as runner:
        late = asyncio.ensure_future(runner.score(said("await")))
        assert await runner.score(said("1", "2")) == [1.0, 2.0]
        with pytest.raises(RewardFailed, match="took longer than 15 s"):
            await late


@pytest.mark.slow
async def test_calls_beside_one_that_blocks_the_process_run_again_and_are_not_charged() -> None:
    async with running("stuck", timeout_s=15.0) as runner:
        blocked = asyncio.ensure_future(runner.score(said("block")))
        assert await runner.score(said("1", "2")) == [1.0, 2.0]
        with pytest.raises(RewardFailed, match="took longer"):
            await blocked
        assert runner.failed_calls == 1


@pytest.mark.slow
async def test_a_call_that_nobody_waits_for_any_more_does_not_cost_the_next_one_its_time(tmp_path: Path) -> None:
    def marked(*completions: str) -> list[Sample]:
        columns = {"marker": str(tmp_path / "marker")}
        return [Sample(prompt="", completion=completion, columns=columns) for completion in completions]

    async with running("raises_or_hangs", timeout_s=15.0) as runner:
        with pytest.raises(RewardFailed, match="cannot judge it"):
            await runner.score(marked("raise", "hang"))
        assert await runner.score(marked("fine")) == [1.0]
        assert (tmp_path / "marker").exists(), "void: no call was under way"
        assert runner.failed_calls == 1


async def test_a_reward_that_kills_its_process_is_named_and_the_next_call_has_a_new_one() -> None:
    async with running("dies", retries=1) as runner:
        with pytest.raises(RewardFailed, match=r"process ended with code 3 \(2 tries\)"):
            await runner.score(said("2"))


async def test_a_reward_that_calls_exit_is_an_ordinary_failure() -> None:
    async with running("leaves") as runner:
        with pytest.raises(RewardFailed, match="raised SystemExit"):
            await runner.score(said("2"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nan", "the reward is nan; it must be finite"),
        ("huge", r"the reward is 1e\+300; it must be finite, in float32 too"),
        ("text", "the reward is 'good'; it must be a number"),
    ],
)
async def test_what_is_no_finite_number_is_named(name: str, why: str) -> None:
    async with running(name) as runner:
        with pytest.raises(RewardFailed, match=why):
            await runner.score(said("2"))


async def test_standard_input_is_empty_for_a_reward() -> None:
    async with running("reads_stdin") as runner:
        assert await runner.score(said("2")) == [0.0]


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (f"{REWARDS}:nothing", "has no nothing"),
        ("no_such_module_anywhere:reward", "cannot be imported"),
        (f"{REWARDS}", "module:function or file.py:function"),
    ],
)
async def test_a_reward_that_cannot_be_imported_is_the_operators_error(run: str, why: str) -> None:
    runner = RewardRunner(run, timeout_s=1.0, retries=0, concurrency=1)
    with pytest.raises(ConfigError, match=why):
        await runner.start()
    await runner.close()


async def test_closing_ends_the_child() -> None:
    async with running("process") as runner:
        (pid,) = await runner.score(said("2"))
        assert alive(int(pid))
    assert not alive(int(pid))


@pytest.mark.parametrize("name", ["hangs_for_good", "hangs_in_c", "starts_a_process"])
def test_the_child_ends_with_a_parent_that_is_killed_and_so_does_what_it_started(name: str, tmp_path: Path) -> None:
    """A hanging call does not keep the child alive; a pipe that only these processes hold shows when all have ended."""
    script, marker = tmp_path / "parent.py", tmp_path / "marker"
    script.write_text(PARENT)
    reading, writing = os.pipe()
    command = [sys.executable, str(script), f"{REWARDS}:{name}", str(marker)]
    parent = subprocess.run(command, pass_fds=[writing], stderr=writing, timeout=60, check=False)
    os.close(writing)
    assert parent.returncode == -signal.SIGKILL
    assert marker.exists()
    with os.fdopen(reading, "rb") as stderr:
        assert stderr.read() == b""  # end of file arrives only once every process has closed its copy, by ending


PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from staleflow.clients.user_code.rewards import RewardRunner, Sample

async def main():
    runner = RewardRunner(sys.argv[1], timeout_s=60, retries=0, concurrency=1)
    await runner.start()
    sample = Sample(prompt="", completion="", columns={"marker": sys.argv[2]})
    scoring = asyncio.ensure_future(runner.score([sample]))
    while not Path(sys.argv[2]).exists():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
