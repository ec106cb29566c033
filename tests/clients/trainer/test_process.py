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

LIMIT_S = 300.0
SLOWLY = ("trainer.simulated_step_s=0.2", "trainer.steps=1000", "trainer.checkpoint_every=3")
"""No trainer reaches the last step before the test ends it."""


def checkpoints(service: Service) -> list[int]:
    folder = service.run_dir / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.exists() else []


def ended(trainer: "subprocess.Popen[bytes]", within_s: float = LIMIT_S) -> int:
    return trainer.wait(timeout=within_s)


def stopped(trainer: "subprocess.Popen[bytes]") -> int:
    """End a trainer with SIGTERM; return its exit code."""
    trainer.send_signal(signal.SIGTERM)
    return ended(trainer, within_s=120.0)


def surviving_steps(service: Service) -> list[int]:
    """Consumed steps, without those that a rollback revoked."""
    steps: list[int] = []
    lines = (service.run_dir / "trace.jsonl").read_bytes().split(b"\n")[:-1]  # the last line may be incomplete
    for event in map(json.loads, lines):
        if event["ev"] == "rollback":
            steps = [step for step in steps if step < event["to_version"]]
        elif event["ev"] == "consume":
            steps.append(event["step"])
    return steps


def check_resumed(service: Service) -> None:
    """Check that a new trainer continues the run, trains every step once, and saves the last one when it is stopped."""
    joins = len(service.trace("join"))
    trainer = service.start_trainer()
    service.wait_for("join", joins + 1, LIMIT_S)
    service.wait_for("consume", len(service.trace("consume")) + 3, LIMIT_S)
    assert stopped(trainer) == 0
    steps = surviving_steps(service)
    assert steps == list(range(len(steps)))
    assert checkpoints(service)[-1] == len(steps)
    assert len(checkpoints(service)) <= service.config.trainer.keep_checkpoints


def kill_after_a_checkpoint(service: Service, trainer: "subprocess.Popen[bytes]") -> int:
    """Kill a trainer that has trained a step after its newest checkpoint; return the version of the checkpoint."""
    service.wait_for("checkpoint", 1, LIMIT_S)
    while True:
        trainer.send_signal(signal.SIGSTOP)  # it saves no other checkpoint meanwhile
        if service.trace("consume")[-1]["step"] >= checkpoints(service)[-1]:
            trainer.kill()
            ended(trainer)
            return checkpoints(service)[-1]
        trainer.send_signal(signal.SIGCONT)
        time.sleep(0.05)
        assert trainer.poll() is None


def test_a_killed_trainer_goes_on_from_its_newest_checkpoint_with_the_same_batches() -> None:
    with serving(*SLOWLY) as service:
        newest = kill_after_a_checkpoint(service, service.start_trainer())
        before = {event["step"]: event["digest"] for event in service.trace("seal")}
        check_resumed(service)
        rollback, *_ = service.trace("rollback")
        again = next(e for e in service.trace("seal") if e["lineage"] == rollback["lineage"] and e["step"] == newest)
        assert (rollback["to_version"], again["digest"]) == (newest, before[newest])


def test_a_trainer_asked_to_end_leaves_a_checkpoint_and_the_run_goes_on_without_a_rollback() -> None:
    with serving(*SLOWLY) as service:
        trainer = service.start_trainer()
        service.wait_for("consume", 2)
        assert stopped(trainer) == 0
        versions = [event["version"] for event in service.trace("publish")]
        assert checkpoints(service)[-1] == versions[-1]
        check_resumed(service)
        assert service.trace("rollback") == []


def test_a_fenced_trainer_says_so_and_ends() -> None:
    # a checkpoint registered after the attach would void the version with which the newer trainer joins
    with serving(*SLOWLY, "trainer.checkpoint_every=1000") as service:
        older = service.start_trainer()
        service.wait_for("consume", 1)
        with TrainerClient(service.address, name="another") as newer:
            attached = newer.attach()
            newer.join(Lineage(0), Version(attached.version))
            assert ended(older, within_s=60.0) == 1
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
