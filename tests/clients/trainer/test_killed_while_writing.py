"""A trainer that is killed while a thread writes a checkpoint resumes from the one before."""

import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.clients.trainer.backends.test_backends import needs_deepspeed
from tests.clients.trainer.service import Service, serving
from tests.clients.trainer.test_process import check_resumed, checkpoints

pytestmark = pytest.mark.slow

LIMIT_S = 240.0


def begun(folder: Path) -> list[Path]:
    """The unfinished checkpoints that have a file; none if one is finished or removed meanwhile."""
    try:
        return [part for part in folder.glob("*.part") if any(part.iterdir())]
    except FileNotFoundError:
        return []


def kill_while_it_writes(service: Service, trainer: "subprocess.Popen[bytes]") -> int:
    """Kill all ranks between the first and the last file of a checkpoint after the first; return its version."""
    folder, deadline = service.run_dir / "checkpoints", time.monotonic() + LIMIT_S
    service.wait_for("checkpoint", 1, LIMIT_S)
    every = [psutil.Process(trainer.pid), *psutil.Process(trainer.pid).children()]
    while time.monotonic() < deadline:
        assert trainer.poll() is None, "it ended before it could be killed"
        if not begun(folder):
            continue
        for process in every:
            with suppress(psutil.NoSuchProcess):  # the next look finds that it ended
                process.suspend()
        unfinished = begun(folder)
        if unfinished and not any((part / "checkpoint.json").exists() for part in unfinished):
            for process in every:
                with suppress(psutil.NoSuchProcess):  # a rank ends with its launcher
                    process.kill()
            trainer.wait(LIMIT_S)
            return int(unfinished[0].name.partition(".")[0])
        for process in every:
            with suppress(psutil.NoSuchProcess):
                process.resume()
    raise AssertionError(f"no checkpoint was seen half written in {LIMIT_S} s")


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(model_directory: Path) -> None:
    check_a_kill(model_directory, "torch", 1)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["fsdp", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_a_kill_of_two_ranks_that_write_a_checkpoint_leaves_the_one_before(model_directory: Path, backend: str) -> None:
    check_a_kill(model_directory, backend, 2)


def check_a_kill(model_directory: Path, backend: str, nproc: int) -> None:
    rollout = ("rollout.engine=transformers", "rollout.max_inflight=16", "rollout.max_new_tokens=8")
    ranks = (f"trainer.backend={backend}", f"trainer.nproc={nproc}")
    trainer = (*ranks, "trainer.steps=1000", "trainer.checkpoint_every=1")
    with serving(*rollout, *trainer, f"model.path={model_directory}") as service:
        unfinished = kill_while_it_writes(service, service.start_trainer())
        before = checkpoints(service)
        assert before
        assert max(before) < unfinished
        check_resumed(service)
        log = (service.run_dir / "logs" / "trainer.log").read_text()
        assert f"resumed from {service.run_dir}/checkpoints/{max(before)}" in log
        assert "is damaged" not in log
        assert not [*(service.run_dir / "checkpoints").glob("*.part")], "what the kill left is removed"
