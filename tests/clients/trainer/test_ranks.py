# pyright: basic, reportMissingImports=false
"""Two ranks of a trainer in a real run: killed, asked to end, started again. Every step is trained once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.clients.trainer.service import Service, serving
from tests.clients.trainer.test_process import surviving_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 120.0


def real(model_directory: Path, *more: str) -> tuple[str, ...]:
    rollout = ("rollout.engine=transformers", "rollout.max_inflight=16", "rollout.max_new_tokens=8")
    return (*rollout, f"model.path={model_directory}", "trainer.backend=ddp", "trainer.nproc=2", *more)


def ranks_of(trainer: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(trainer.pid).children()
    return found


def deliveries(service: Service) -> set[tuple[int, int]]:
    return {(event["step"], event["rank"]) for event in service.trace("deliver")}


def test_every_rank_is_delivered_every_batch_and_one_that_dies_ends_the_trainer(model_directory: Path) -> None:
    with serving(*real(model_directory, "trainer.steps=200", "trainer.checkpoint_every=2")) as service:
        trainer = service.start_trainer()
        service.wait_for("checkpoint", 1, LIMIT_S)
        first, second = ranks_of(trainer)
        second.kill()
        assert trainer.wait(LIMIT_S) != 0
        assert not first.is_running()
        again = service.start_trainer()
        service.wait_for("join", 2, LIMIT_S)
        service.wait_for("consume", len(service.trace("consume")) + 2, LIMIT_S)
        again.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        assert again.wait(LIMIT_S) == 0
        assert time.monotonic() - asked < 10
        steps = surviving_steps(service)
        assert steps == list(range(len(steps)))
        assert {(step, rank) for step in steps for rank in (0, 1)} <= deliveries(service)
        newest = max(int(path.name) for path in (service.run_dir / "checkpoints").iterdir() if path.name.isdecimal())
        assert newest == len(steps)


def test_ranks_started_by_torchrun_train_a_run_to_its_end(model_directory: Path) -> None:
    with serving(*real(model_directory, "trainer.steps=3", "trainer.backend=fsdp")) as service:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "staleflow.cli", "attach", "train", "--run-dir", str(service.run_dir), "--name", "trainer"]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=LIMIT_S, check=False)
        assert done.returncode == 0
        assert deliveries(service) == {(step, rank) for step in range(3) for rank in (0, 1)}
        assert surviving_steps(service) == [0, 1, 2]
