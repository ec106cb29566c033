"""A trainer process that is killed, stopped or fenced leaves a run that trains every step once."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from staleflow.clients.trainer.client import TrainerClient
from staleflow.protocols.consistency.ids import Lineage, Version
from tests.clients.trainer.service import Service, serving

SLOWLY = ("trainer.simulated_step_s=0.2", "trainer.steps=8", "trainer.checkpoint_every=3")


def checkpoints(service: Service) -> list[int]:
    folder = service.run_dir / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.exists() else []


def ended(trainer: "subprocess.Popen[bytes]", within_s: float = 60.0) -> int:
    return trainer.wait(timeout=within_s)


def surviving_steps(service: Service) -> list[int]:
    """Consumed steps, without those that a rollback revoked."""
    steps: list[int] = []
    lines = (service.run_dir / "trace.jsonl").read_bytes().splitlines()
    for event in map(json.loads, lines):
        if event["ev"] == "rollback":
            steps = [step for step in steps if step < event["to_version"]]
        elif event["ev"] == "consume":
            steps.append(event["step"])
    return steps


def test_a_killed_trainer_goes_on_from_its_newest_checkpoint_with_the_same_batches() -> None:
    with serving(*SLOWLY, "trainer.simulated_step_s=0.8", "trainer.checkpoint_every=4") as service:
        killed = service.start_trainer()
        service.wait_for("consume", 5)
        killed.send_signal(signal.SIGKILL)
        ended(killed)
        before = {event["step"]: event["digest"] for event in service.trace("seal")}
        assert checkpoints(service) == [4]
        assert ended(service.start_trainer()) == 0
        rollback, *_ = service.trace("rollback")
        again = next(e for e in service.trace("seal") if e["lineage"] == rollback["lineage"] and e["step"] == 4)
        assert (rollback["to_version"], again["digest"]) == (4, before[4])
        assert surviving_steps(service) == list(range(8))
        assert checkpoints(service) == [4, 8]


def test_a_trainer_asked_to_end_leaves_a_checkpoint_and_the_run_goes_on_without_a_rollback() -> None:
    with serving(*SLOWLY) as service:
        stopped = service.start_trainer()
        service.wait_for("consume", 2)
        stopped.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        assert ended(stopped, within_s=8.0) == 0
        assert time.monotonic() - asked < 8.0
        versions = [event["version"] for event in service.trace("publish")]
        assert checkpoints(service)[-1] == versions[-1]
        assert ended(service.start_trainer()) == 0
        assert service.trace("rollback") == []
        assert surviving_steps(service) == list(range(8))


def test_a_fenced_trainer_says_so_and_ends() -> None:
    with serving(*SLOWLY, "trainer.steps=1000") as service:
        older = service.start_trainer()
        service.wait_for("consume", 1)
        with TrainerClient(service.address, name="another") as newer:
            attached = newer.attach()
            newer.join(Lineage(0), Version(attached.version))
            assert ended(older, within_s=20.0) == 1
        text = (service.run_dir / "logs" / "trainer.log").read_text()
        assert "another trainer has joined the run, this one stops" in text
        assert "Traceback" not in text


def test_a_checkpoint_folder_of_another_run_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving("trainer.steps=1") as service:
        other = service.run_dir / "checkpoints" / "0"
        other.mkdir(parents=True)
        (other / "checkpoint.json").write_text("{}")
        assert ended(service.start_trainer()) == 0
        assert surviving_steps(service) == [0]


def test_a_run_whose_payload_outgrows_the_map_between_two_checkpoints_goes_on() -> None:
    with serving(
        "trajectories.map_mb=4",
        "trajectories.shards=1",
        "rollout.max_new_tokens=256",
        "rollout.simulated.mean_tokens=200",
        "rollout.group_size=16",
        "trainer.batch_size=6",
        "trainer.simulated_step_s=0.05",
        "trainer.steps=40",
        "trainer.checkpoint_every=1000",
    ) as service:
        assert ended(service.start_trainer()) == 0
        assert surviving_steps(service) == list(range(40))
        assert len(service.trace("checkpoint")) > 1
