# pyright: basic, reportMissingImports=false
"""Two ranks of a trainer in a real run train every step once, although they are killed, stopped and restarted."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from safetensors.torch import load_file

from staleflow.clients.trainer.backends.tensors import to_array
from staleflow.clients.weights.tensors import part
from staleflow.servers.parameters.versions import About
from tests.clients.trainer.backends.test_backends import needs_deepspeed
from tests.clients.trainer.service import Service, serving
from tests.clients.trainer.test_process import check_resumed, checkpoints, surviving_steps

pytestmark = pytest.mark.slow

LIMIT_S = 300.0
ENGINES = Path(__file__).parents[2] / "rollout" / "engines" / "user_engines.py"
"""Its tokens are those of a model, and no process needs torch for them."""


def real(model_directory: Path, *more: str) -> tuple[str, ...]:
    engine = (f"rollout.engine={ENGINES}:Echo", "rollout.engine_options={wait_s=0.5}")
    rollout = (*engine, "rollout.max_inflight=16", "rollout.max_new_tokens=8")
    return (*rollout, f"model.path={model_directory}", "trainer.backend=ddp", "trainer.nproc=2", *more)


def ranks_of(trainer: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(trainer.pid).children()
    return found


def deliveries(service: Service) -> set[tuple[int, int]]:
    return {(event["step"], event["rank"]) for event in service.trace("deliver")}


def published(service: Service, version: int) -> dict[str, bytes]:
    """Return the bytes of each tensor of a version of lineage 0."""
    file = service.run_dir / f"parameters/0-{version}.bin"
    about = msgspec.json.decode(file.with_suffix(".json").read_bytes(), type=About)
    content = memoryview(file.read_bytes())
    return {entry.name: bytes(part(content, entry)) for entry in about.manifest.tensors}


def test_every_rank_is_delivered_every_batch_and_one_that_dies_ends_the_trainer(model_directory: Path) -> None:
    with serving(*real(model_directory, "trainer.steps=1000", "trainer.checkpoint_every=2")) as service:
        trainer = service.start_trainer()
        service.wait_for("checkpoint", 1, LIMIT_S)
        first, second = ranks_of(trainer)
        second.kill()
        assert trainer.wait(LIMIT_S) != 0
        assert not first.is_running()
        check_resumed(service)
        assert {(step, rank) for step in surviving_steps(service) for rank in (0, 1)} <= deliveries(service)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("ddp", marks=pytest.mark.long),
        "fsdp",
        pytest.param("deepspeed", marks=[pytest.mark.long, needs_deepspeed]),
    ],
)
def test_all_ranks_resume_from_the_same_older_checkpoint_where_the_file_of_one_rank_is_damaged(
    model_directory: Path, backend: str
) -> None:
    settings = (f"trainer.backend={backend}", "trainer.steps=1000", "trainer.checkpoint_every=2")
    with serving(*real(model_directory, *settings)) as service:
        trainer = service.start_trainer()
        service.wait_for("checkpoint", 2, LIMIT_S)
        for process in (*ranks_of(trainer), trainer):
            with suppress(psutil.NoSuchProcess):  # the launcher ends the other ranks of a killed one
                process.kill()
        trainer.wait(LIMIT_S)
        older, newest = checkpoints(service)[-2:]
        folder = service.run_dir / "checkpoints" / str(newest)
        file = next(iter((*folder.glob("*-1-of-2.safetensors"), *sorted(folder.glob("optimizer/*"), reverse=True))))
        file.write_bytes(file.read_bytes()[:-1])
        check_resumed(service)
        assert [event["to_version"] for event in service.trace("rollback")] == [older]
        assert len({event["digest"] for event in service.trace("seal") if event["step"] == older}) == 1
        assert len([*folder.parent.glob(f"{newest}.*.damaged")]) == 1
        assert (
            f"checkpoint {newest} is damaged ({file.relative_to(folder)} "
            in (service.run_dir / "logs/trainer.log").read_text()
        )


def test_ranks_started_by_torchrun_train_a_run_to_its_end(model_directory: Path) -> None:
    with serving(*real(model_directory, "trainer.steps=3", "trainer.backend=fsdp")) as service:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "staleflow.cli", "attach", "train", "--run-dir", str(service.run_dir), "--name", "trainer"]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=LIMIT_S, check=False)
        assert done.returncode == 0
        assert deliveries(service) == {(step, rank) for step in range(3) for rank in (0, 1)}
        assert surviving_steps(service) == [0, 1, 2]
        folder = service.run_dir / "checkpoints" / "3"
        gathered = {
            name: bytes(to_array(tensor).data) for name, tensor in load_file(folder / "model.safetensors").items()
        }
        assert published(service, 3) == gathered, "each rank has published its own part"
