"""Server processes exit with the right code and leave the reason in the log."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from staleflow.net.client import BlockingClient
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import GetStatus

Start = Callable[[str], "subprocess.Popen[str]"]

PROGRAM = """
import asyncio, logging, sys
from pathlib import Path
from staleflow.configs.errors import ConfigError
from staleflow.protocols.wire.messages import Done
from staleflow.process.daemon import Stop, run
from staleflow.net.endpoint import Endpoint
run_dir = Path(sys.argv[1])
log = logging.getLogger("test")
def ready(): (run_dir / "ready").touch()
{main}
sys.exit(run(main, "scheduler", run_dir))
"""

WAITS = """
async def main(stop):
    ready()
    log.info("drains because of %s", await stop.wait())
"""

IGNORES = """
async def main(stop):
    ready()
    await asyncio.sleep(600)
"""

ECHO = """
async def main(stop):
    endpoint = Endpoint(f"ipc://{run_dir}/s", on_call=lambda call: call.reply(Done(), call.frames))
    serving = asyncio.create_task(endpoint.serve())
    ready()
    await stop.wait()
    endpoint.close()
    await serving
"""


@pytest.fixture
def start(short_dir: Path) -> Iterator[Start]:
    """Return a function that starts a process and waits until the process reports that it is ready."""
    processes: list[subprocess.Popen[str]] = []

    def start(main: str) -> "subprocess.Popen[str]":
        (short_dir / "ready").unlink(missing_ok=True)
        command = [sys.executable, "-W", "error", "-c", PROGRAM.replace("{main}", main), str(short_dir)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        deadline = time.monotonic() + 120
        while not (short_dir / "ready").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def log_of(run_dir: Path) -> str:
    return (run_dir / "logs" / "scheduler.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_0(start: Start, short_dir: Path, number: signal.Signals) -> None:
    process = start(WAITS)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert f"drains because of {number.name}" in errors
    assert errors == log_of(short_dir)


def test_a_second_signal_leaves_at_once(start: Start, short_dir: Path) -> None:
    process = start(IGNORES)
    process.send_signal(signal.SIGTERM)
    while "stopping" not in log_of(short_dir):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 128 + signal.SIGTERM
    assert "exiting immediately" in log_of(short_dir)


def test_an_exception_ends_with_1_and_is_in_the_log(start: Start, short_dir: Path) -> None:
    process = start("async def main(stop):\n    raise ValueError('no such thing')")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "ValueError: no such thing" in errors
    assert "Traceback" in log_of(short_dir)


def test_an_exception_in_a_callback_ends_the_process_too(start: Start, short_dir: Path) -> None:
    main = """
async def main(stop):
    def fail(): raise ValueError("no such thing")
    asyncio.get_running_loop().call_soon(fail)
    await asyncio.sleep(600)
"""
    process = start(main)
    process.communicate(timeout=120)
    assert process.returncode == 1
    assert "ValueError: no such thing" in log_of(short_dir)


def test_the_operators_error_is_one_line_and_2(start: Start) -> None:
    process = start("async def main(stop):\n    raise ConfigError('bind', 'tcp://*:1', 'it must be loopback')")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors == 'staleflow scheduler: bind is "tcp://*:1"; it must be loopback\n'


def test_a_run_directory_that_cannot_be_written_is_the_operators_error(start: Start, short_dir: Path) -> None:
    (short_dir / "logs").write_text("in the way")
    process = start(WAITS)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.startswith(f"staleflow scheduler: run directory is {short_dir}; ")
    assert errors.count("\n") == 1


def test_a_log_is_continued_by_the_next_process(start: Start, short_dir: Path) -> None:
    for _ in range(2):
        start("async def main(stop):\n    log.info('here')").communicate(timeout=120)
    assert log_of(short_dir).count("scheduler INFO test: here") == 2


def test_a_server_killed_in_the_middle_of_a_call_answers_after_its_restart(start: Start, short_dir: Path) -> None:
    process = start(ECHO)
    client = BlockingClient(f"ipc://{short_dir}/s", worker=WorkerId("trainer-0.1"))
    try:
        assert bytes(client.call(GetStatus(), [b"before"])[1][0]) == b"before"
        process.send_signal(signal.SIGSTOP)  # guarantees that the call is pending when the process dies
        restarted: list[subprocess.Popen[str]] = []

        def kill_and_restart() -> None:
            process.kill()
            process.wait()
            restarted.append(start(ECHO))

        killer = threading.Timer(0.2, kill_and_restart)
        killer.start()
        assert bytes(client.call(GetStatus(), [b"across"])[1][0]) == b"across"
        killer.join()
    finally:
        client.close()
    restarted[0].terminate()
    assert restarted[0].wait(120) == 0
